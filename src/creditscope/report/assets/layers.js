/* Layers: kinds of parameters as an overview, then every parameter, sorted by a click on a header and filtered by a part
   of its name. Numbers are those of the chosen step; a small line shows r_eff over all steps that were read. */
creditscope.section("layers", async (root, { steps, names, kind, layers, kind_names, kinds }) => {
  const { el, svg, on, number, show } = creditscope;
  const MOST = 20; // rows at first; models have hundreds of parameters
  const COLUMNS = [["name", "parameter"], ["share", "share of energy"], ["effective_rank", "r_eff"], ["top1", "top-1"], ["stable_rank", "stable rank"]];
  let sorted = { key: "share", down: true }, all = false;

  const filter = el("input", { id: "layers-filter", type: "search", placeholder: "q_proj, layers.3 …", autocomplete: "off", spellcheck: "false",
    on: { input: () => { all = false; draw(); } } });
  const told = el("output", { id: "layers-told", class: "soft", for: "layers-filter" });
  const overview = el("div", { id: "layers-kinds" }), list = el("div", { id: "layers-list" });
  root.append(overview, el("h3", {}, "By parameter"), el("div", { class: "bar" }, el("label", { for: "layers-filter" }, "Filter"), filter, told), list);

  const at = () => steps.indexOf(creditscope.chart.nearest(steps, number("step", steps[steps.length - 1])));
  const row = (name, table, i, t) => ({ name, line: table.effective_rank[i],
    ...Object.fromEntries(COLUMNS.slice(1).map(([key]) => [key, table[key][i][t]])) });

  function draw() {
    const t = at(), words = filter.value.trim().toLowerCase().split(/[\s,]+/).filter(Boolean);
    const named = names.map((name, i) => ({ ...row(name, layers, i, t), kind: kind[i] }));
    const found = named.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word))).sort(compare);
    const some = all ? found : found.slice(0, MOST);
    told.textContent = `${found.length} of ${names.length} parameters at step ${steps[t]}`;
    overview.replaceChildren(el("h3", {}, `By kind, at step ${steps[t]}`), grid("Layers by kind", kind_names.map((name, i) => row(name, kinds, i, t)), [["name", "kind"], ...COLUMNS.slice(1)], kindName));
    const sortedBy = document.activeElement?.dataset?.sort;
    const by = COLUMNS.find(([key]) => key === sorted.key)[1];
    list.replaceChildren(!found.length ? el("p", { class: "missing" }, "No parameter matches the filter.")
      : grid("Layers by parameter", some, COLUMNS, ({ name }) => el("span", { class: "mono" }, name), header),
      some.length < found.length ? el("p", { class: "soft", id: "layers-some" }, `These are ${some.length} of ${found.length}, the first by ${by}.`) : "",
      el("div", { class: "tools" },
        some.length < found.length && el("button", { type: "button", id: "layers-all", on: { click: () => { all = true; draw(); } } }, `all ${found.length}`),
        found.length > 0 && el("button", { type: "button", id: "layers-csv", "aria-label": "Layers: save as CSV", on: { click: () => save(found, steps[t]) } }, "CSV")));
    if (sortedBy) list.querySelector(`[data-sort="${sortedBy}"]`)?.focus();
  }

  /* Numbers with the largest first or last, names by the alphabet; what is not there stands last either way. */
  function compare(a, b) {
    const [x, y] = [a[sorted.key], b[sorted.key]], sign = sorted.down ? -1 : 1;
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  }

  function header([key, title]) {
    const mine = sorted.key === key, down = mine ? !sorted.down : key !== "name";
    return el("th", { scope: "col", class: key === "name" ? null : "number", "aria-sort": mine ? (sorted.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", class: "sort", "data-sort": key, on: { click: () => { sorted = { key, down }; draw(); } } }, title));
  }

  const plain = ([key, title]) => el("th", { scope: "col", class: key === "name" ? null : "number" }, title);

  function kindName({ name }) {
    return el("button", { type: "button", class: "sort", "data-kind": name, title: `show the parameters of ${name}`,
      on: { click: () => { filter.value = name; all = false; draw(); list.scrollIntoView({ block: "nearest" }); } } }, name);
  }

  function grid(label, rows, columns, name, head = plain) {
    const cell = (one, [key]) => key === "name" ? el("th", { scope: "row" }, name(one))
      : el("td", { class: "number" }, key === "share" && one[key] !== null ? show(100 * one[key], 3) + " %" : show(one[key], 3));
    return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, el("table", { class: "layers" },
      el("thead", {}, el("tr", {}, ...columns.map(head), el("th", { scope: "col" }, "r_eff over steps"))),
      el("tbody", {}, ...rows.map((one) => el("tr", { "data-layer": one.name }, ...columns.map((column) => cell(one, column)), el("td", {}, spark(one.line)))))));
  }

  /* r_eff over the steps that were read, as a glyph: its words say first, last, least and most. */
  function spark(line) {
    const known = line.map((value, i) => [i, value]).filter(([, value]) => value !== null);
    if (!known.length) return "–";
    const values = known.map(([, value]) => value), [low, high] = [Math.min(...values), Math.max(...values)];
    const x = (i) => 2 + 86 * i / Math.max(line.length - 1, 1), y = (value) => high > low ? 17 - 14 * (value - low) / (high - low) : 10;
    const points = known.map(([i, value]) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`), last = known[known.length - 1];
    const words = `r_eff from ${show(values[0], 3)} to ${show(last[1], 3)}, least ${show(low, 3)}, most ${show(high, 3)}, ${known.length} readings`;
    return svg("svg", { class: "spark", width: 90, height: 20, viewBox: "0 0 90 20", role: "img", "aria-label": words }, svg("title", {}, words),
      svg("path", { d: "M" + points.join("L"), fill: "none", stroke: "currentColor", "stroke-width": 1.5 }),
      svg("circle", { cx: x(last[0]), cy: y(last[1]), r: 2, fill: "currentColor" }));
  }

  function save(rows, step) {
    const lines = rows.map(({ name, kind: of, share, effective_rank, top1, stable_rank }) => ({ step, parameter: name, kind: of, share, effective_rank, top1, stable_rank }));
    creditscope.save("layers.csv", creditscope.csv(lines), "text/csv");
  }

  on(["step"], draw);
});
