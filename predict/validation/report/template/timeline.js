// One iteration: zoom and move by buttons, keys, wheel with Ctrl, or dragging; a bar is told below.
"use strict";
(() => {
  const R = Report;
  const MOST_ZOOM = 5000;
  const LANE = 40;
  const HELP = "Keys: + and - zoom, left and right arrows move, Home shows all, n and p choose the next and the previous"
    + " bar. Ctrl and the wheel zoom, dragging moves.";

  const describe = (data, bar) => {
    const [lane, kind, start, length, tasks, batch] = bar;
    const of = data.kinds[kind];
    const about = data.lanes[lane];
    const lines = [
      `${of.name}${tasks > 1 ? ` and ${tasks - 1} more` : ""} (${of.category.replaceAll("_", " ")}) on ${about.stream} of ${about.role}`,
      `starts at ${R.seconds(start / 1e6)}, takes ${R.seconds(length / 1e6)}${batch >= 0 ? `, micro-batch ${batch}` : ""}`,
    ];
    const more = [];
    if (of.layer && of.layer !== of.name) more.push(`layer ${of.layer}`);
    if (of.bytes !== undefined) more.push(R.bytes(of.bytes));
    if (of.group) more.push(`over ${of.group}`);
    more.push(`source: ${String(of.source).replaceAll("_", " ")}`);
    if (of.interval_us) more.push(`alone ${of.interval_us.map((end) => R.seconds(end / 1e6)).join(" to ")} (90%)`);
    return R.plain([...lines, more.join(", ")].join("\n")).replace(/\r/g, "");
  };

  // Bars inside of the view, without those that would fall on a pixel that has one.
  const visible = (bars, [from, to], width) => {
    const pixel = (to - from) / width;
    let lane = -1;
    let last = 0;
    return bars.filter((bar) => {
      if (bar[2] + bar[3] < from || bar[2] > to) return false;
      const end = Math.floor((bar[2] + bar[3] - from) / pixel);
      if (bar[0] === lane && end === last && bar[3] < pixel) return false;
      [lane, last] = [bar[0], end];
      return true;
    });
  };

  // What is shown and chosen stays where the page becomes wider or narrower.
  const kept = { view: null, chosen: null, of: null };
  R.draw("timeline", (data, width) => {
    if (kept.of !== data.iteration_s) Object.assign(kept, { view: null, chosen: null, of: data.iteration_s });
    const whole = data.iteration_s * 1e6;
    const [scale, unit] = R.unitOf(data.iteration_s, R.SECONDS);
    const perUnit = 1e6 * scale;
    const category = (bar) => data.kinds[bar[1]].category;
    let view = kept.view || [0, whole];
    let chosen = kept.chosen === null ? null : data.bars[kept.chosen];
    let plot = null;
    const frame = R.element("div", { tabindex: "0", role: "application", "aria-label": `Timeline. ${HELP}` });
    const told = R.element("p", { class: "told", "aria-live": "polite" }, HELP);
    const tell = (bar) => {
      chosen = bar;
      kept.chosen = bar ? data.bars.indexOf(bar) : null;
      told.textContent = bar ? describe(data, bar) : HELP;
    };

    const make = () => {
      const shown = visible(data.bars, view, width);
      // The shortest are a pixel wide, to be seen at all.
      const end = (bar) => (bar[2] + Math.max(bar[3], (view[1] - view[0]) / width)) / perUnit;
      const lanes = data.lanes.map((_, index) => index);
      return R.plot({
        ...R.common(width), height: LANE * lanes.length + 64, marginTop: 8, marginBottom: 44,
        color: { type: "identity" },
        x: { domain: view.map((end) => end / perUnit), label: `time in the iteration (${unit})`, labelAnchor: "center", grid: true },
        y: { type: "band", domain: lanes, axis: null, paddingInner: 0.5, paddingOuter: 0.5 },
        marks: [
          Plot.barX(shown, { y: "0", x1: (bar) => bar[2] / perUnit, x2: end,
            fill: (bar) => R.fill(category(bar)), clip: true }),
          Plot.barX(chosen ? [chosen] : [], { y: "0", x1: (bar) => bar[2] / perUnit, x2: end,
            fill: "none", stroke: "currentColor", strokeWidth: 2.5, clip: true }),
          Plot.text(lanes, { y: (lane) => lane, frameAnchor: "left", dy: -17, fontSize: 12,
            text: (lane) => R.shortened(R.plain(`${data.lanes[lane].role}: ${data.lanes[lane].stream}`), width) }),
        ],
      });
    };
    const redraw = () => {
      const next = make();
      if (plot) plot.replaceWith(next);
      else frame.append(next);
      plot = next;
      frame.dataset.from = view[0];
      frame.dataset.to = view[1];
    };
    let waiting = false;
    const later = () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        redraw();
      });
    };
    const show = (from, length) => {
      const shown = Math.min(Math.max(length, whole / MOST_ZOOM), whole);
      const start = Math.min(Math.max(from, 0), whole - shown);
      view = [start, start + shown];
      kept.view = view;
      later();
    };
    const zoom = (factor, at = (view[0] + view[1]) / 2) =>
      show(at - (at - view[0]) / factor, (view[1] - view[0]) / factor);
    const move = (share) => show(view[0] + share * (view[1] - view[0]), view[1] - view[0]);
    const all = () => show(0, whole);
    const step = (by) => {
      const place = chosen ? data.bars.indexOf(chosen) + by : by > 0 ? 0 : data.bars.length - 1;
      const bar = data.bars[Math.min(Math.max(place, 0), data.bars.length - 1)];
      tell(bar);
      if (bar[2] < view[0] || bar[2] + bar[3] > view[1]) show(bar[2] + bar[3] / 2 - (view[1] - view[0]) / 2, view[1] - view[0]);
      later();
    };

    const at = (event) => {
      const box = plot.getBoundingClientRect();
      const x = ((event.clientX - box.left) * width) / box.width;
      const y = ((event.clientY - box.top) * width) / box.width;
      return { time: plot.scale("x").invert(x) * perUnit, y };
    };
    const barAt = (event) => {
      const { time, y } = at(event);
      const band = plot.scale("y");
      const lane = data.lanes.findIndex((_, index) => y >= band.apply(index) && y <= band.apply(index) + band.bandwidth);
      const reach = ((view[1] - view[0]) / width) * 2;
      const near = data.bars.filter((bar) => bar[0] === lane && bar[2] - reach <= time && time <= bar[2] + bar[3] + reach);
      return d3.least(near, (bar) => Math.abs(bar[2] + bar[3] / 2 - time) - bar[3] / 2);
    };
    let held = null;
    frame.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse") return;
      held = { x: event.clientX, from: view[0] };
      frame.setPointerCapture(event.pointerId);
    });
    frame.addEventListener("pointerup", () => (held = null));
    frame.addEventListener("pointercancel", () => (held = null));
    frame.addEventListener("pointermove", (event) => {
      if (held) {
        show(held.from - ((event.clientX - held.x) / width) * (view[1] - view[0]), view[1] - view[0]);
        return;
      }
      const bar = barAt(event);
      if (bar && bar !== chosen) {
        tell(bar);
        later();
      }
    });
    frame.addEventListener("click", (event) => {
      const bar = barAt(event);
      if (bar) tell(bar);
      later();
    });
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, at(event).time);
    }, { passive: false });
    frame.addEventListener("dblclick", (event) => zoom(2, at(event).time));
    const keys = {
      "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), ArrowLeft: () => move(-0.2),
      ArrowRight: () => move(0.2), Home: all, 0: all, n: () => step(1), p: () => step(-1),
    };
    frame.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });

    const tools = R.element("div", { class: "tools" });
    const buttons = [["Zoom in", () => zoom(1.5)], ["Zoom out", () => zoom(1 / 1.5)], ["Earlier", () => move(-0.2)],
      ["Later", () => move(0.2)], ["All", all], ["Previous bar", () => step(-1)], ["Next bar", () => step(1)]];
    for (const [text, act] of buttons) {
      const button = R.element("button", { type: "button" }, text);
      button.addEventListener("click", act);
      tools.append(button);
    }
    redraw();
    tell(chosen);
    return [R.legendOfParts(data.bars.map(category)), tools, frame, told];
  });
})();
