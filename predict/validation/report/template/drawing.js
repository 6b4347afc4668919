// What the charts share: units, fills, legends, and drawing again where the width changes.
"use strict";
const Report = (() => {
  const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;
  const plain = (text) => String(text).replace(CONTROL, "");
  const read = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
  const found = (name) => document.getElementById(`chart-${name}`);

  const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
  const unitOf = (most, units) => units.find(([scale]) => most >= scale) || units[units.length - 1];
  const told = (value, units) => {
    if (!value) return `0 ${units === BYTES ? "B" : "s"}`;
    const [scale, unit] = unitOf(Math.abs(value), units);
    return `${Number((value / scale).toPrecision(3))} ${unit}`;
  };
  const seconds = (value) => told(value, SECONDS);
  const bytes = (value) => told(value, BYTES);
  const percent = (value) => `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)}%`;

  // Each part of an iteration has one fill on the whole page.
  const FILLS = new Map([["FW", 0], ["BW", 1], ["GE", 2], ["WU", 3], ["pipeline_idle", 4], ["waiting", 4], ["rest", 8],
    ["hidden", 9]]);
  const NAMED = FILLS.size;
  const fillOf = (index) => `url(#fill-${index % 10})`;
  const fill = (part) => {
    if (!FILLS.has(part)) FILLS.set(part, 5 + ((FILLS.size - NAMED) % 3));
    return fillOf(FILLS.get(part));
  };
  const symbols = ["circle", "square", "triangle", "diamond2", "star", "hexagon", "cross", "wye"];
  const colour = (index) => `var(--c${index % 4})`;

  const element = (name, attributes = {}, text = "") => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = plain(text);
    return made;
  };
  const swatch = (of, d) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("width", 18);
    svg.setAttribute("height", 14);
    svg.setAttribute("aria-hidden", "true");
    const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
    shape.setAttribute("d", d);
    for (const [key, value] of Object.entries(of)) shape.setAttribute(key, value);
    svg.append(shape);
    return svg;
  };
  // Entries are [text, attributes of its swatch, path of it where it is no box].
  const legend = (entries) => {
    const list = element("ul", { class: "legend" });
    for (const [text, of, d] of entries) {
      const item = element("li");
      item.append(swatch(of, d || "M0 0H18V14H0Z"), plain(text).replaceAll("_", " "));
      list.append(item);
    }
    return list;
  };
  const legendOfParts = (parts, of = fill) => legend([...new Set(parts)].map((part) => [part, { fill: of(part) }]));
  const legendOfSymbols = (entries) =>
    legend(entries.map(([text, symbol, of]) => {
      const type = d3[`symbol${symbol[0].toUpperCase()}${symbol.slice(1)}`];
      return [text, { transform: "translate(9 7)", ...of }, d3.symbol(type, 60)()];
    }));

  // What a chart shows stands beside it as text and as a table: its parts would only be noise to who listens.
  const plot = (options) => {
    const drawn = Plot.plot(options);
    drawn.setAttribute("aria-hidden", "true");
    drawn.setAttribute("focusable", "false");
    return drawn;
  };
  const common = (width) => ({
    width,
    marginLeft: 12,
    marginRight: 24,
    style: { fontSize: "13px", background: "transparent", fontFamily: "inherit" },
  });
  // Rows with their names above them, so that a narrow page has room for both.
  const LABELLED = 46;
  const rowsOf = (labels) => ({
    height: LABELLED * labels.length + 60,
    marginTop: 16,
    marginBottom: 44,
    y: { domain: labels, axis: null, paddingInner: 0.55, paddingOuter: 0.35 },
  });
  const names = (labels, width) =>
    Plot.text(labels, {
      y: (label) => label,
      text: (label) => shortened(plain(label), width),
      frameAnchor: "left",
      dx: 4,
      dy: -20,
      title: (label) => plain(label),
    });
  const shortened = (text, width) => {
    const most = Math.max(20, Math.floor(width / 7.2));
    return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
  };

  const drawers = new Map();
  const draw = (name, make) => {
    const target = found(name);
    if (!target) return;
    let drawn = 0;
    const again = (anew) => {
      const width = Math.max(260, Math.floor(target.clientWidth));
      const ready = document.getElementById(`data-${name}`).textContent;
      if (!ready || (width === drawn && !anew)) return;
      drawn = width;
      const held = target.contains(document.activeElement);
      target.replaceChildren(...[make(read(name), width)].flat());
      if (held) target.querySelector("[tabindex], select").focus();
    };
    drawers.set(name, again);
    again(false);
    new ResizeObserver(() => again(false)).observe(target);
  };
  // Other data in the place of those of a chart, of a page that asks for them.
  const update = (name, data) => {
    document.getElementById(`data-${name}`).textContent = JSON.stringify(data);
    drawers.get(name)(true);
  };
  return {
    SECONDS, BYTES, bytes, colour, common, draw, element, fill, fillOf, found, legend, legendOfParts, legendOfSymbols, names,
    percent, plain, plot, read, rowsOf, seconds, shortened, symbols, unitOf, update,
  };
})();
