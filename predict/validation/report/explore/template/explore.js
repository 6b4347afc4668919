// Controls, what they ask for, and what is shown of the answers. The address holds the state.
"use strict";
(() => {
  const R = Report;
  const MOST_PINS = 4;
  const at = (id) => document.getElementById(id);
  const beginning = JSON.parse(at("beginning").textContent);
  const SLIDERS = [...document.querySelectorAll("#sliders input")].map((slider) => slider.id);
  const CONTROLS = ["profile", "model", "ranks", "batch", "memory", "dtype", "device"];
  const LEFT_OUT = "leave out";
  // Rows are those of a search (found) on some hardware, as they are on that of the sliders.
  const state = { rows: [], found: [], row: 0, foundOn: {}, pins: [] };

  // The controls.
  const offer = (id, choices) => {
    const before = at(id).value;
    at(id).replaceChildren(...choices.map(([value, text]) => R.element("option", { value }, text)));
    if (choices.some(([value]) => String(value) === before)) at(id).value = before;
  };
  const ofProfile = () => {
    const profile = beginning.profiles[Number(at("profile").value) || 0];
    offer("model", profile.models.map((name) => [name, name]));
    offer("dtype", [["", "as in the profile"], ...profile.dtypes.map((name) => [name, name])]);
  };
  const factor = (id) => Number((10 ** Number(at(id).value)).toPrecision(3));
  const tellFactors = () => SLIDERS.forEach((id) => { at(`said-${id}`).textContent = `× ${factor(id)}`; });
  const changed = () => {
    const made = Object.fromEntries(SLIDERS.map((id) => [id, factor(id)]).filter(([, value]) => value !== 1));
    return at("device").value ? { ...made, device: at("device").value } : made;
  };
  const searched = () => ({
    profile: Number(at("profile").value), model: at("model").value, ranks: Number(at("ranks").value),
    batch: Number(at("batch").value), memory: at("memory").value.trim(), dtype: at("dtype").value,
  });
  const asked = (row) => ({ search: searched(), found_on: state.foundOn, changed: changed(), row });

  // The address.
  const keep = () => {
    const query = new URLSearchParams();
    for (const id of CONTROLS) if (at(id).value) query.set(id, at(id).value);
    for (const id of SLIDERS) if (Number(at(id).value)) query.set(id, at(id).value);
    if (state.row) query.set("row", state.row);
    if (state.pins.length) query.set("pins", JSON.stringify(state.pins));
    history.replaceState(null, "", `?${query}`);
  };
  const parsed = (text, otherwise) => {
    try { return JSON.parse(text) ?? otherwise; } catch { return otherwise; }
  };
  const restore = () => {
    const query = new URLSearchParams(location.search);
    const of = (id) => query.get(id) ?? beginning.start[id] ?? "";
    offer("profile", beginning.profiles.map((profile, index) => [index, profile.name]));
    if (query.has("profile")) at("profile").value = query.get("profile");
    if (at("profile").selectedIndex < 0) at("profile").selectedIndex = 0;
    ofProfile();
    offer("device", [["", "as measured"], ...beginning.devices.map((name) => [name, name])]);
    for (const id of CONTROLS.slice(1)) if (of(id)) at(id).value = of(id);
    for (const id of ["model", "dtype", "device"]) if (at(id).selectedIndex < 0) at(id).selectedIndex = 0;
    for (const id of SLIDERS) at(id).value = query.get(id) ?? 0;
    state.row = Math.max(Math.trunc(Number(query.get("row"))) || 0, 0);
    const pins = parsed(query.get("pins"), []);
    state.pins = Array.isArray(pins) ? pins.slice(0, MOST_PINS) : [];
    tellFactors();
  };

  // Answers.
  let leaving = new AbortController();
  const ask = async (what, content) => {
    const { signal } = leaving;
    const answer = await fetch(what, { method: "POST", body: JSON.stringify(content), signal }).catch(() => {
      throw new Error("The command that serves this page has ended. Start predict explore again, and open its new address.");
    });
    const told = await answer.json().catch(() => {
      throw new Error("The command failed on this question. Its terminal says why.");
    });
    if (!answer.ok) throw new Error(told.error);
    return told;
  };
  const cells = (row) => [
    R.seconds(row.iteration_s), row.interval_s.map(R.seconds).join(" to "), String(Number(row.samples_per_s.toPrecision(4))),
    R.percent(row.efficiency), R.bytes(row.memory_bytes), row.fits === null ? "not known" : row.fits ? "yes" : "no",
  ];
  const fadeRows = (faded) => ["rows", "figure-ranking"].forEach((id) => at(id).classList.toggle("old", faded));
  const showRows = () => {
    fadeRows(false);
    const order = state.rows.map((row, index) => [row, index]).sort(([one], [other]) => one.iteration_s - other.iteration_s);
    const focused = document.activeElement && document.activeElement.name === "row";
    at("rows").tBodies[0].replaceChildren(...order.map(([row, index]) => {
      const made = R.element("tr");
      const label = R.element("label");
      const choice = R.element("input", { type: "radio", name: "row", value: index });
      choice.checked = index === state.row;
      choice.addEventListener("change", () => { state.row = index; refresh(); });
      label.append(choice, R.plain(row.label));
      const first = R.element("td");
      first.append(label);
      made.append(first, ...cells(row).map((text) => R.element("td", { class: "short" }, text)));
      return made;
    }));
    if (focused) document.querySelector("input[name=row]:checked").focus();
    R.update("ranking", { rows: order.map(([row]) => row.ranking), by_rate: false });
  };
  const showLook = (look) => {
    at("chosen").textContent = R.plain(look.label);
    at("said").textContent = R.plain(look.said.join(" "));
    at("remarks").replaceChildren(...look.remarks.map((text) => R.element("li", {}, text)));
    at("command").textContent = R.plain(look.command);
    at("python").textContent = R.plain(look.python);
    for (const [name, data] of Object.entries(look.figures)) R.update(name, data);
  };

  // One question at a time; what was asked meanwhile is asked once, as it is by then. A search is left off for it.
  let wanted = 0;
  let busy = false;
  let searching = false;
  const working = async (work) => {
    wanted += 1;
    if (searching) leaving.abort();
    if (busy) return;
    busy = true;
    try {
      for (let done = 0; done !== wanted;) {
        done = wanted;
        const begun = performance.now();
        at("error").textContent = "";
        at("answers").setAttribute("aria-busy", "true");
        try {
          const said = await work(() => done !== wanted, () => `${Math.round(performance.now() - begun)} ms.`);
          at("status").textContent = said;
        } catch (error) {
          if (done !== wanted) continue;
          at("error").textContent = R.plain(error.message);
          at("status").textContent = "";
        }
      }
    } finally {
      busy = false;
      at("answers").removeAttribute("aria-busy");
    }
  };
  let search = true;
  let whole = false;
  let held = false;
  const find = async (stale, there) => {
    searching = true;
    at("answers").classList.toggle("old", search);
    const pressed = whole;
    whole = false;
    const found = await ask("search", { ...asked(0), found_on: there, whole: pressed }).catch((error) => {
      // Rows of another search are not those of the controls: there are none until one has an answer.
      if (!stale()) [search, state.rows, at("answers").hidden] = [true, [], true];
      throw error;
    }).finally(() => { searching = false; leaving = new AbortController(); at("answers").classList.remove("old"); });
    const chosen = state.rows.length ? found.rows.findIndex((row) => row.label === state.rows[state.row].label) : state.row;
    const kept = chosen in found.rows;
    [search, state.found, state.rows, state.foundOn, state.row] = [false, found.rows, found.rows, there, kept ? chosen : 0];
    at("answers").hidden = !state.rows.length;
    at("searched").textContent = R.plain(found.said);
    return kept ? "" : "The strategy that was chosen is no longer among the fastest. This is the fastest one. ";
  };
  const refresh = () => working(async (stale, took) => {
    keep();
    const there = changed();
    const slid = JSON.stringify(there) !== JSON.stringify(state.foundOn);
    let said = "";
    if (slid && !search) {
      showLook(await ask("look", asked(state.row)));
      fadeRows(true);
      at("status").textContent = `The chosen strategy is predicted on this hardware, after ${took()} The table is still to come.`;
      if (stale()) return "";
      state.rows = (await ask("rows", asked(state.row))).rows;
      showRows();
      said = `These strategies are predicted on this hardware, after ${took()} Others, which may be faster on it, are still to come.`;
    }
    if (said || search) at("status").textContent = said || "Searching…";
    if (stale() || held) return said;
    said = slid || search ? await find(stale, there) : "";
    state.rows = state.found.slice();
    showLook(state.rows[state.row] = await ask("look", asked(state.row)));
    showRows();
    await showPins();
    keep();
    return `${said}Answered in ${took()}`;
  });

  // Configurations side by side.
  const named = (id) => (at(id).labels ? at(id).labels[0].firstChild.textContent.trim() : id);
  const called = (pin) => Object.entries(pin.changed || {})
    .map(([name, value]) => (name === "device" ? value : `${named(name)} times ${value}`)).join(", ");
  const showPins = async () => {
    const columns = [];
    const titles = ["configuration", "profile", "model", "ranks", "hardware", "iteration", "90% interval", "samples/s",
      "efficiency", "memory", "fits", LEFT_OUT];
    for (const [index, pin] of state.pins.entries()) {
      try {
        const row = await ask("row", pin);
        const { profile, model, ranks } = pin.search;
        const hardware = called(pin) || "as measured";
        columns.push([row.label, beginning.profiles[profile].name, model, String(ranks), hardware, ...cells(row), index]);
      } catch (error) {
        // A link may hold anything: what cannot be predicted can still be left out.
        columns.push([error.message, ...Array(titles.length - 2).fill(""), index]);
      }
    }
    at("pins").tBodies[0].replaceChildren(...(columns.length ? titles : []).map((title, place) => {
      const made = R.element("tr");
      made.append(R.element("th", { scope: "row" }, title), ...columns.map((column) => {
        if (title !== LEFT_OUT) return R.element("td", {}, R.plain(column[place]));
        const remove = R.element("button", { type: "button", "aria-label": `${LEFT_OUT}: ${column[0]}` }, LEFT_OUT);
        remove.addEventListener("click", () => { state.pins.splice(column[place], 1); refresh(); });
        const cell = R.element("td");
        cell.append(remove);
        return cell;
      }));
      return made;
    }));
    at("pin").disabled = state.pins.length >= MOST_PINS;
  };

  const anew = () => { [search, state.rows, state.row] = [true, [], 0]; refresh(); };
  at("controls").addEventListener("submit", (event) => { event.preventDefault(); whole = true; anew(); });
  at("profile").addEventListener("change", ofProfile);
  at("controls").addEventListener("change", (event) => (event.target.id === "device" ? refresh() : anew()));
  for (const id of SLIDERS) at(id).addEventListener("input", () => { tellFactors(); refresh(); });
  at("reset").addEventListener("click", () => { for (const id of SLIDERS) at(id).value = 0; tellFactors(); refresh(); });
  // Nothing is searched while a pointer holds a slider.
  at("sliders").addEventListener("pointerdown", () => { held = true; });
  for (const end of ["pointerup", "pointercancel"]) {
    window.addEventListener(end, () => { if (held) { held = false; refresh(); } });
  }
  at("pin").addEventListener("click", () => { state.pins.push(asked(state.row)); refresh(); });
  restore();
  refresh();
})();
