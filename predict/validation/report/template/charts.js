// All charts but the timeline, each on its own data.
"use strict";
(() => {
  const R = Report;
  const labelsOf = (rows) => [...new Set(rows.map((row) => row.label))];
  const ink = "currentColor";
  const tip = { fill: "var(--paper)", stroke: "var(--line)", fontSize: 13, lineWidth: 24 };

  R.draw("ranking", ({ rows, by_rate: byRate }, width) => {
    const [scale, unit] = R.unitOf(d3.max(rows, (row) => row.iteration_s), R.SECONDS);
    const at = (row, seconds) => (byRate ? row.batch / seconds : seconds / scale);
    // An interval that begins at 0 s has no highest rate.
    const reach = (row) => (byRate && row.interval_s[0] <= 0 ? row.iteration_s : row.interval_s[0]);
    const kind = (row, index) => (row.fits === false ? "times" : index === 0 ? "star" : "circle");
    const ranged = rows.filter((row) => row.interval_s);
    const plot = R.plot({
      ...R.common(width), ...R.rowsOf(labelsOf(rows)),
      symbol: { type: "identity" },
      x: { label: byRate ? "samples per second" : `time of an iteration (${unit})`, labelAnchor: "center", grid: true, zero: true, nice: true },
      marks: [
        Plot.ruleX([0]),
        Plot.ruleY(ranged, { y: "label", x1: (row) => at(row, reach(row)), x2: (row) => at(row, row.interval_s[1]),
          stroke: R.colour(0), strokeWidth: 3, strokeOpacity: 0.6 }),
        Plot.dot(rows, { y: "label", x: (row) => at(row, row.iteration_s), symbol: kind, r: 7, stroke: ink, strokeWidth: 1.5,
          fill: (row) => (row.fits === false ? "none" : R.colour(0)), tip,
          title: (row) => `${R.plain(row.label)}\n${R.seconds(row.iteration_s)}`
            + (row.interval_s ? `, ${R.seconds(row.interval_s[0])} to ${R.seconds(row.interval_s[1])}` : "") }),
        R.names(labelsOf(rows), width),
      ],
      color: { type: "identity" },
    });
    const own = { fill: R.colour(0), stroke: ink };
    return [R.legendOfSymbols([["the answer", "star", own], ["others", "circle", own],
      ["needs more memory than there is", "times", { fill: "none", stroke: ink }]]), plot];
  });

  // Stacked bars, and what is drawn over them.
  const stacked = (rows, width, value, label, unitOf, { over = [], fill = R.fill } = {}) => {
    const most = d3.max(d3.rollups(rows, (of) => d3.sum(of, (row) => Math.max(value(row), 0)), (row) => row.label), (of) => of[1]);
    const [scale, unit] = R.unitOf(most, unitOf);
    const said = unitOf === R.BYTES ? R.bytes : R.seconds;
    return R.plot({
      ...R.common(width), ...R.rowsOf(labelsOf(rows)),
      color: { type: "identity" }, symbol: { type: "identity" },
      x: { label: `${label} (${unit})`, labelAnchor: "center", grid: true },
      marks: [
        Plot.barX(rows.filter((row) => value(row)), Plot.stackX({ y: "label", x: (row) => value(row) / scale,
          fill: (row) => fill(row.part), stroke: "var(--paper)", strokeWidth: 0.5, tip,
          title: (row) => `${R.plain(row.label)}\n${R.plain(row.part).replaceAll("_", " ")}: ${said(value(row))}` })),
        Plot.ruleX([0]),
        ...over.map((mark) => mark(scale)),
        R.names(labelsOf(rows), width),
      ],
    });
  };

  R.draw("breakdown", (rows, width) => [
    R.legendOfParts(rows.filter((row) => row.seconds).map((row) => row.part)),
    stacked(rows, width, (row) => row.seconds, "time in an iteration", R.SECONDS),
  ]);

  R.draw("phases", (sides, width) => {
    const name = (side) => `${side.label}, ${side.side}`;
    const rows = sides.flatMap((side) =>
      Object.entries(side.parts_s).map(([part, seconds]) => ({ label: name(side), part, seconds })));
    const ends = (scale) => Plot.ruleY(sides, { y: name, x1: (side) => side.spread_s[0] / scale,
      x2: (side) => side.spread_s[1] / scale, stroke: ink, strokeWidth: 2.5 });
    const whole = (scale) => Plot.dot(sides, { y: name, x: (side) => side.iteration_s / scale, r: 5, fill: "var(--paper)",
      stroke: ink, strokeWidth: 2, symbol: (side) => (side.side === "measured" ? "square" : "circle") });
    const own = { fill: "var(--paper)", stroke: ink, "stroke-width": 2 };
    return [
      R.legendOfParts(rows.filter((row) => row.seconds).map((row) => row.part)),
      R.legendOfSymbols([["predicted, with its 90% interval", "circle", own], ["measured, with its quartiles", "square", own]]),
      stacked(rows, width, (row) => row.seconds, "time in an iteration", R.SECONDS, { over: [ends, whole] }),
    ];
  });

  R.draw("efficiency", (data, width) => {
    const series = [...new Set(data.points.map((point) => point.series))];
    const place = (point) => series.indexOf(point.series);
    const ranks = [...new Set(data.points.map((point) => point.ranks))];
    const plot = R.plot({
      ...R.common(width), height: 340, marginLeft: 56, marginBottom: 44,
      color: { type: "identity" }, symbol: { type: "identity" },
      x: { type: "log", base: 2, label: "ranks", labelAnchor: "center", ticks: ranks, tickFormat: (count) => String(count) },
      y: { label: "efficiency (%)", percent: true, grid: true, zero: true },
      marks: [
        ...series.flatMap((name, index) => {
          const own = data.points.filter((point) => point.series === name);
          return [
            Plot.areaY(own, { x: "ranks", y1: (point) => point.interval[0], y2: (point) => point.interval[1],
              fill: R.colour(index), fillOpacity: 0.2 }),
            Plot.lineY(own, { x: "ranks", y: "efficiency", stroke: R.colour(index), strokeWidth: 2 }),
          ];
        }),
        Plot.ruleX(data.knees, { x: "ranks", stroke: ink, strokeDasharray: "5 4" }),
        Plot.text(data.knees, { x: "ranks", frameAnchor: "bottom", dy: -8, dx: -6, textAnchor: "end",
          text: (knee) => `knee ${knee.ranks}` }),
        Plot.dot(data.points, { x: "ranks", y: "efficiency", r: 5, symbol: (point) => R.symbols[place(point) % 8],
          fill: (point) => R.colour(place(point)), stroke: ink, tip,
          title: (point) => `${R.plain(point.label)}\n${R.percent(point.efficiency)}, `
            + `${R.percent(point.interval[0])} to ${R.percent(point.interval[1])}` }),
        Plot.ruleY([0]),
      ],
    });
    const named = series.map((name, index) => [name, R.symbols[index % 8], { fill: R.colour(index), stroke: ink }]);
    return [R.legendOfSymbols(named), plot];
  });

  R.draw("memory", (data, width) => {
    const rows = data.rows.flatMap((row) =>
      Object.entries(row.parts_bytes).map(([part, bytes]) => ({ label: row.label, part, bytes })));
    const parts = [...new Set(rows.filter((row) => row.bytes).map((row) => row.part))];
    const fill = (part) => R.fillOf(parts.indexOf(part));
    const ranged = data.rows.filter((row) => row.interval_bytes);
    // A limit far beyond all peaks would leave the bars no room: it is said in words then.
    const most = d3.max(data.rows, (row) => row.peak_bytes);
    const near = data.limit_bytes !== null && data.limit_bytes < 4 * most;
    const over = [
      (scale) => Plot.ruleY(ranged, { y: "label", x1: (row) => row.interval_bytes[0] / scale,
        x2: (row) => row.interval_bytes[1] / scale, stroke: ink, strokeWidth: 2.5 }),
      (scale) => Plot.dot(data.rows, { y: "label", x: (row) => row.peak_bytes / scale, r: 5, fill: "var(--paper)",
        stroke: ink, strokeWidth: 2 }),
      (scale) => Plot.ruleX(near ? [data.limit_bytes / scale] : [], { stroke: ink, strokeWidth: 2, strokeDasharray: "6 4" }),
    ];
    const beyond = near || data.limit_bytes === null ? []
      : [R.element("p", { class: "shows" }, `The limit, ${R.bytes(data.limit_bytes)}, lies far to the right.`)];
    return [
      R.legendOfParts(parts, fill),
      stacked(rows, width, (row) => row.bytes, "memory of a rank", R.BYTES, { over, fill }),
      ...beyond,
    ];
  });

  R.draw("waterfall", (rows, width) => {
    const [scale, unit] = R.unitOf(d3.max(rows, (row) => row.end_s), R.SECONDS);
    return R.plot({
      ...R.common(width), ...R.rowsOf(labelsOf(rows)), color: { type: "identity" },
      x: { label: `time in an iteration (${unit})`, labelAnchor: "center", grid: true },
      marks: [
        Plot.barX(rows, { y: "label", x1: (row) => row.begin_s / scale, x2: (row) => row.end_s / scale, fill: R.colour(0), tip,
          title: (row) => `${row.label}: ${R.seconds(row.end_s - row.begin_s)}` }),
        Plot.ruleX([0]),
        R.names(labelsOf(rows), width),
      ],
    });
  });

  R.draw("entries", (entries, width) => {
    const rows = entries.flatMap((entry, index) => {
      const label = `${index + 1}. ${entry.label}`;
      return [{ label, part: entry.phase, seconds: entry.exposed_s }, { label, part: "hidden", seconds: entry.hidden_s }];
    });
    const parts = rows.filter((row) => row.seconds).map((row) => row.part);
    return [R.legendOfParts(parts.sort((one, other) => (one === "hidden") - (other === "hidden"))), stacked(rows, width, (row) => row.seconds, "time in an iteration", R.SECONDS)];
  });

  R.draw("limitations", (data, width) => {
    if (!data.rows.length) return R.element("p", {}, "Nothing takes any time of the iteration.");
    const labels = labelsOf(data.rows);
    const kind = (row) => (row.state === "not present" ? "times" : "circle");
    const plot = R.plot({
      ...R.common(width), ...R.rowsOf(labels), color: { type: "identity" }, symbol: { type: "identity" },
      x: { label: "share of the iteration (%)", labelAnchor: "center", percent: true, grid: true, zero: true },
      marks: [
        Plot.ruleX([0]),
        Plot.ruleX([data.at_least], { stroke: ink, strokeDasharray: "5 4" }),
        Plot.ruleY(data.rows, { y: "label", x1: (row) => row.interval[0], x2: (row) => row.interval[1], stroke: R.colour(1),
          strokeWidth: 3, strokeOpacity: 0.6 }),
        Plot.dot(data.rows, { y: "label", x: "share", r: 6, symbol: kind, stroke: ink, strokeWidth: 1.5,
          fill: (row) => (row.state === "present" ? R.colour(1) : "var(--paper)"), tip,
          title: (row) => `${row.label}: ${row.state}\n${R.percent(row.share)}, `
            + `${R.percent(row.interval[0])} to ${R.percent(row.interval[1])}` }),
        R.names(labels, width),
      ],
    });
    return [R.legendOfSymbols([["present", "circle", { fill: R.colour(1), stroke: ink }],
      ["possible", "circle", { fill: "var(--paper)", stroke: ink }],
      ["not present", "times", { fill: "none", stroke: ink }]]), plot];
  });

  const ERRORS = [["residual", "points fitted", "circle"], ["held_out", "sizes left out", "square"],
    ["held_out_ranks", "rank counts left out", "triangle"]];
  R.draw("fit_errors", (fits, width) => {
    const rows = fits.flatMap((fit) => ERRORS.map(([name, , symbol], index) =>
      ({ label: fit.label, error: fit[name], said: ERRORS[index][1], symbol, index }))).filter((row) => row.error !== null);
    const plot = R.plot({
      ...R.common(width), ...R.rowsOf(labelsOf(rows)), color: { type: "identity" }, symbol: { type: "identity" },
      x: { label: "median relative error (%)", labelAnchor: "center", percent: true, grid: true, zero: true },
      marks: [
        Plot.ruleX([0]),
        Plot.dot(rows, { y: "label", x: "error", r: 5, symbol: "symbol", fill: (row) => R.colour(row.index), stroke: ink, tip,
          title: (row) => `${R.plain(row.label)}\n${row.said}: ${R.percent(row.error)}` }),
        R.names(labelsOf(rows), width),
      ],
    });
    return [R.legendOfSymbols(ERRORS.map(([, said, symbol], index) => [said, symbol, { fill: R.colour(index), stroke: ink }])), plot];
  });

  const curves = (group, width) => {
    const points = group.ranks.flatMap((of, index) =>
      of.points.map(([bytes, measured, fitted, heldOut]) => ({ index, ranks: of.ranks, bytes, measured, fitted, heldOut })));
    const at = { type: "log", base: 2, label: "message (bytes)", labelAnchor: "center", tickFormat: (size) => R.bytes(size),
      ticks: width < 600 ? 4 : 8 };
    const shape = { x: "bytes", symbol: (point) => R.symbols[point.index % 8], stroke: (point) => R.colour(point.index), r: 4.5 };
    const scales = { ...R.common(width), marginLeft: 64, marginBottom: 44, color: { type: "identity" }, symbol: { type: "identity" } };
    const positive = points.filter((point) => point.bytes > 0 && point.measured > 0);
    const above = R.plot({
      ...scales, height: 340, x: at,
      y: { type: "log", label: "time of a call", grid: true, tickFormat: (value) => R.seconds(value), ticks: 5 },
      marks: [
        ...group.ranks.flatMap((of, index) => [
          Plot.areaY(of.curve, { x: "0", y1: "2", y2: "3", fill: R.colour(index), fillOpacity: 0.18 }),
          Plot.lineY(of.curve, { x: "0", y: "1", stroke: R.colour(index), strokeWidth: 1.8 }),
        ]),
        Plot.dot(positive, { ...shape, y: "measured", fill: (point) => R.colour(point.index), tip,
          title: (point) => `${point.ranks} ranks, ${R.bytes(point.bytes)}\nmeasured ${R.seconds(point.measured)}, `
            + `fitted ${R.seconds(point.fitted)}` }),
      ],
    });
    const missed = (name) => (point) => point[name] / point.measured - 1;
    const below = R.plot({
      ...scales, height: 220, x: at, y: { label: "fitted - measured (%)", percent: true, grid: true },
      marks: [
        Plot.ruleY([0]),
        Plot.dot(positive, { ...shape, y: missed("fitted"), fill: (point) => R.colour(point.index) }),
        Plot.dot(positive, { ...shape, y: missed("heldOut"), fill: "var(--paper)", strokeWidth: 1.8 }),
      ],
    });
    const named = group.ranks.map((of, index) => [`${of.ranks} ranks`, R.symbols[index % 8], { fill: R.colour(index), stroke: ink }]);
    return [R.legendOfSymbols(named), above, below];
  };
  R.draw("fits", (groups, width) => {
    const inner = R.element("div");
    const choice = R.element("select", { "aria-label": "Which collective is drawn" });
    groups.forEach((group, index) => choice.append(R.element("option", { value: index }, group.label)));
    choice.addEventListener("change", () => inner.replaceChildren(...curves(groups[choice.value], width)));
    inner.append(...curves(groups[0], width));
    const tools = R.element("div", { class: "tools" });
    tools.append(choice);
    return [tools, inner];
  });
})();
