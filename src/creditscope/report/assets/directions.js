/* Directions at the chosen step and group: cosines as a grid that is walked with the arrow keys, the two answers of a
   chosen cell, singular values beside their nulls, and every definition of rank. */
creditscope.section("directions", async (root, { looks, definitions, kinds, chart, keep }) => {
  const { el, on, set, number, show } = creditscope;
  const MEAN = "mean", ROOMY = 16; // cells of larger grids are too small for their number
  const steps = looks.map((look) => look.step);

  const select = el("select", { id: "directions-group", on: { change: () => set({ group: select.value === MEAN ? null : select.value, row: null, other: null }) } });
  const at = el("output", { id: "directions-at", class: "soft" });
  root.append(el("div", { class: "bar" }, el("label", { for: "directions-group" }, "Group"), select, at));
  const rollouts = el("div", { id: "directions-rollouts" }), groups = el("div", { id: "directions-between" });
  const sigma = el("figure", { class: "figure", id: "directions-spectrum" });
  const pair = el("div", { id: "directions-pair", "aria-live": "polite" }), table = el("div", { id: "directions-ranks" });
  root.append(el("div", { class: "grams" }, rollouts, groups, sigma), pair, table);

  const rows = []; // of the chart, changed in place so that its CSV follows
  const view = await creditscope.chart(sigma, chart, { rows, name: "spectrum" });
  sigma.append(el("figcaption", { class: "soft" }, "The square of the sum of the values is r_eff. Orthogonal rows give the largest it can be with these norms."));

  let look = null, shown = null; // the reading, and the group whose rollouts the grid shows
  const chosen = () => look.groups.find((group) => group.id === number("group")) || null;

  function redraw() {
    look = looks[steps.indexOf(creditscope.chart.nearest(steps, number("step", steps[steps.length - 1])))];
    const group = chosen();
    shown = group || look.groups.find((one) => one.cos) || look.groups[0];
    at.textContent = `step ${look.step}${number("step", look.step) === look.step ? "" : ", the nearest that was read"}; ${look.mean.live} of ${look.groups.length} groups have a gradient`;
    select.replaceChildren(el("option", { value: MEAN }, "mean of live groups"), ...look.groups.map((one) =>
      el("option", { value: one.id }, `group ${one.id}: ${told(one)}`)));
    select.value = group ? group.id : MEAN;
    drawRollouts();
    drawBetween();
    drawSpectrum(group || look.mean);
    drawRanks(group || look.mean, group);
    drawPair();
  }

  function told(group) {
    const mean = group.reward.reduce((sum, x) => sum + x, 0) / group.reward.length;
    const rank = kinds.length && group.cos ? `, r_eff ${show(group.ranks[0][0], 3)}` : ", no gradient";
    return `reward ${show(mean, 3)}${rank}`;
  }

  function drawRollouts() {
    const title = el("h3", {}, `Rollouts of group ${shown.id}, cosines`);
    const first = chosen() ? "" : "No group is chosen, so this is the first that has a gradient; the other numbers are means of groups. ";
    if (!shown.cos) {
      rollouts.replaceChildren(title, el("p", { class: "missing" }, `No rollout of this group has a gradient${new Set(shown.reward).size > 1 ? "." : ": its rewards are all the same, so every credit is 0."}`));
      return;
    }
    const names = shown.rows.map((row, i) => ({ text: String(row), more: ` · ${show(shown.reward[i], 2)}`, reward: shown.reward[i], label: `rollout ${row}, reward ${show(shown.reward[i])}, norm ${show(shown.norm[i], 3)}` }));
    const grid = gram(names, shown.cos, "Cosines of rollouts", (i, j) =>
      set({ step: look.step, group: shown.id, row: shown.rows[i], other: shown.rows[j] }));
    swap(rollouts, title, grid, el("p", { class: "soft" }, first, "Rows: rollout · reward, the best first; lines part the rewards. −1: they pull apart, 1: the same way. Choose a cell to read its two answers."));
  }

  function drawBetween() {
    const title = el("h3", {}, "Groups, cosines of their mean rows");
    if (!look.between) {
      groups.replaceChildren(title, el("p", { class: "missing" }, look.groups.length < 2 ? "This step has one group." : "Groups were read in micro-batches that never met, so there are no products between them. Get them with ", look.groups.length < 2 ? null : el("code", {}, "creditscope lab train --accumulate 1")));
      return;
    }
    const names = look.between.ids.map((id, i) => ({ text: String(id), more: "", reward: 0, label: `group ${id}, norm of its mean ${show(look.between.norm[i], 3)}` }));
    swap(groups, title, gram(names, look.between.cos, "Cosines of groups", (i) => set({ step: look.step, group: look.between.ids[i], row: null, other: null })),
      el("p", { class: "soft" }, "Choose a row to see its group."));
  }

  /* Replace a grid by another and leave the keyboard where it was. */
  function swap(place, ...children) {
    const held = place.contains(document.activeElement) ? document.activeElement.dataset : null;
    place.replaceChildren(...children);
    if (held) focus(place, held.i, held.j);
  }

  /* Move the one cell of a grid that the Tab key reaches. */
  function focus(place, i, j) {
    const next = place.querySelector(`[data-i="${i}"][data-j="${j}"]`);
    if (!next) return;
    place.querySelector('td[tabindex="0"]').tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /* A symmetric grid of cosines from the part above its diagonal, a byte of hundredths each. One cell at a time takes the focus. */
  function gram(names, above, label, pick) {
    const n = names.length, bytes = Int8Array.from(atob(above), (c) => c.charCodeAt(0)), NONE = -128;
    const between = (i, j) => i === j ? 100 : bytes[Math.min(i, j) * (2 * n - Math.min(i, j) - 1) / 2 + Math.abs(i - j) - 1];
    const edge = (i) => i > 0 && names[i].reward !== names[i - 1].reward;
    const cell = (i, j) => {
      const value = between(i, j), text = value === NONE ? "–" : show(value / 100, 2);
      return el("td", { role: "gridcell", tabindex: i + j ? -1 : 0, "data-i": i, "data-j": j, "aria-selected": "false",
        class: [value < 0 ? "minus" : "plus", edge(i) && "below", edge(j) && "right"].filter(Boolean).join(" "),
        style: `--part: ${value === NONE ? 0 : Math.abs(value)}%`, title: `${names[i].label}; ${names[j].label}; cosine ${text}` }, text.replace("-", "−").replace("0.", "."));
    };
    const grid = el("table", { class: n <= ROOMY ? "gram" : "gram dense", role: "grid", "aria-label": label },
      el("thead", {}, el("tr", {}, el("td", {}), ...names.map((name) => el("th", { scope: "col", title: name.label }, name.text)))),
      el("tbody", {}, ...names.map((name, i) => el("tr", {}, el("th", { scope: "row", title: name.label, "data-of": i }, name.text, name.more), ...names.map((_, j) => cell(i, j))))));
    const place = ({ dataset: { of, i = of, j = of } }) => i === undefined ? null : [Number(i), Number(j)];
    grid.addEventListener("click", (event) => {
      const found = place(event.target);
      if (found) { focus(grid, ...found); pick(...found); }
    });
    grid.addEventListener("keydown", (event) => {
      const found = place(event.target), move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!found || !(move || event.key === "Enter" || event.key === " ")) return;
      event.preventDefault();
      if (move) focus(grid, found[0] + move[0], found[1] + move[1]); else pick(...found);
    });
    return el("div", { class: "wide" }, grid);
  }

  /* The two answers of the chosen cell, or the one of the chosen rollout. */
  function drawPair() {
    const [i, j] = ["row", "other"].map((key) => shown.rows.indexOf(number(key, -1)));
    for (const cell of rollouts.querySelectorAll("td[data-i]")) cell.setAttribute("aria-selected", String(Number(cell.dataset.i) === i && Number(cell.dataset.j) === j));
    if (i < 0) { pair.replaceChildren(); return; }
    const both = j < 0 || j === i ? [i] : [i, j];
    pair.replaceChildren(el("h3", {}, both.length > 1 ? `Rollouts ${shown.rows[i]} and ${shown.rows[j]}` : `Rollout ${shown.rows[i]}`),
      el("div", { class: "cards" }, ...both.map(answer)), why());
  }

  function answer(i) {
    const row = shown.rows[i], facts = [`rollout ${row}`, `reward ${show(shown.reward[i])}`,
      shown.w && `w ${show(shown.w[i], 3)}`, shown.norm && `‖g‖ ${show(shown.norm[i], 3)}`];
    return el("div", { class: "card", "data-row": row }, el("p", { class: "soft" }, facts.filter(Boolean).join(" · ")),
      look.texts && el("p", { class: "said", dir: "auto" }, look.texts[row] || "⟨empty⟩"));
  }

  function why() {
    if (look.texts) return el("p", { class: "soft" }, "The token view shows them token by token.");
    if (look.kept) return el("p", { class: "missing" }, "The answers of this step were kept, and are not in this part of the file: see the token view.");
    return el("p", { class: "missing" }, "The answers of this step were not kept. Keep them with ", el("code", {}, keep), ".");
  }

  function drawSpectrum(part) {
    const { sigma: values = [], orthogonal = [], low = [], high = [] } = part;
    rows.splice(0, rows.length, ...values.map((value, i) => ({ k: i + 1, measured: value, orthogonal: orthogonal[i], shuffled_low: low[i], shuffled_high: high[i] })));
    const numbers = sigma.querySelector("details");
    if (numbers) { numbers.open = false; numbers.querySelector(".wide")?.remove(); } // those of the last group
    if (view) view.data("rows", rows.slice()).runAsync();
  }

  function drawRanks(part, group) {
    const title = group ? `Rank of group ${group.id} by every definition` : "Rank by every definition, mean of live groups";
    const cells = (d) => kinds.map((_, k) => el("td", { class: "number" }, part.ranks[k] ? show(part.ranks[k][d]) : "–"));
    const name = (definition) => el("th", { scope: "row" }, definition.title, el("div", { class: "soft mono" }, definition.equation));
    table.replaceChildren(el("h3", {}, title), el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": title },
      el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "definition"), ...kinds.map((kind) => el("th", { scope: "col", class: "number" }, kind)),
        el("th", { scope: "col" }, "what it says"))),
      el("tbody", {}, ...definitions.map((definition, d) => el("tr", { "data-rank": definition.name }, name(definition), ...cells(d),
        el("td", { class: "soft" }, definition.says)))))),
    el("div", { class: "tools" }, el("button", { type: "button", "aria-label": `${title}: save as CSV`, on: { click: () => save(part) } }, "CSV")));
  }

  function save(part) {
    const lines = definitions.map((definition, d) => ({ definition: definition.name, equation: definition.equation,
      ...Object.fromEntries(kinds.map((kind, k) => [kind, part.ranks[k] ? part.ranks[k][d] : null])) }));
    creditscope.save("ranks.csv", creditscope.csv(lines), "text/csv");
  }

  on(["step", "group"], redraw);
  on(["row", "other"], drawPair);
});
