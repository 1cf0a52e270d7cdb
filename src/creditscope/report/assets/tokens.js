/* A group side by side. The tokens of a group are made once; a colour is an attribute of each, so that choosing another
   quantity changes no text. One token is in the tab order, arrow keys move it; the address says which one it is. */
creditscope.section("tokens", (root, data) => {
  const { el, on, set, number, show, state, chart } = creditscope;
  const MOST = 2000; // tokens of an answer that are drawn unasked
  const LEVELS = 5;
  const SCALES = { // from a value to the number that is coloured, and back
    signed: { to: (v) => v, from: (x) => (x > 0 ? "+" : "") + show(x, 3) },
    ratio: { to: Math.log, from: (x) => "×" + show(Math.exp(x), 4) },
    amount: { to: (v) => v, from: (x) => show(x, 3) },
    surprise: { to: (v) => -v, from: (x) => show(-x, 3) },
    flag: { to: (v) => v, from: (x) => (x ? "yes" : "no") },
  };
  const quantities = new Map(data.quantities.map((quantity) => [quantity.key, quantity]));
  const steps = data.steps.map(({ step }) => step);
  let now = null; // what is drawn: { at, group, answers, expanded }

  // -- where we are ---------------------------------------------------------------------------------------------------

  const mixed = (group) => new Set(group.answers.map(({ reward }) => reward)).size > 1;

  /* The place in the data that the address means: the nearest step, and its group by name, by row, or the first mixed one. */
  function place() {
    const at = steps.indexOf(chart.nearest(steps, number("step", steps[steps.length - 1]))), { groups } = data.steps[at], row = number("row");
    const group = groups.find((g) => g.group === number("group")) || groups.find((g) => g.answers.some((a) => a.row === row))
      || groups.find(mixed) || groups[0];
    return { at, group };
  }

  const colour = () => quantities.has(state.colour) ? state.colour : data.quantities.length ? data.quantities[0].key : null;
  const go = (at) => at >= 0 && at < steps.length && set({ step: steps[at], row: null, other: null, token: null });
  function turn(by) {
    const { groups } = data.steps[now.at], next = groups[groups.indexOf(now.group) + by];
    if (next) set({ group: next.group, row: null, other: null, token: null });
  }

  // -- what stays: the bar, the legend, the panel ---------------------------------------------------------------------

  const choose = (label, id, change) => {
    const box = el("select", { id, on: { change: () => change(box.value) } });
    bar.append(el("label", { for: id }, label), box);
    return box;
  };
  const bar = el("div", { class: "bar" });
  const stepBox = choose("Step", "token-step", (value) => go(Number(value)));
  const groupBox = choose("Group", "token-group", (value) => set({ group: value, row: null, other: null, token: null }));
  const colourBox = choose("Colour", "token-colour", (value) => set({ colour: value }));
  stepBox.append(...steps.map((step, i) => el("option", { value: i }, step)));
  colourBox.append(...data.quantities.map(({ key, name }) => el("option", { value: key }, name)));
  const told = el("p", { class: "soft told", "aria-live": "polite" });
  const legend = el("p", { class: "legend" });
  const prompt = el("div", { class: "prompt" });
  const grid = el("div", { class: "answers-grid", role: "grid", "aria-label": "answers, one a row; arrow keys move between tokens" });
  const panel = el("aside", { class: "token-panel", "aria-live": "polite", "aria-label": "values of the token" });
  const nodes = el("div", { class: "prefixes" });
  const keys = [["← →", "token"], ["↑ ↓", "answer"], ["[ ]", "group"], [", .", "step"]];
  const help = el("p", { class: "soft help" }, "Keys, once a token has the focus: ",
    ...keys.flatMap(([key, what]) => [el("kbd", {}, key), ` ${what}  `]));
  const view = root.querySelector("#token-view");
  view.append(bar, told, legend, prompt, el("div", { class: "token-columns" }, grid, panel), help, nodes);
  view.addEventListener("keydown", press);

  // -- colours --------------------------------------------------------------------------------------------------------

  const level = (share) => Math.min(LEVELS, Math.max(1, Math.ceil(share * LEVELS - 1e-9)));
  const tint = (x, top) => !x || Number.isNaN(x) ? null : (x > 0 ? "+" : "-") + (top ? level(Math.abs(x) / top) : LEVELS);

  function recolour() {
    const key = colour(), quantity = quantities.get(key);
    if (key === null) return;
    colourBox.value = key;
    const { to } = SCALES[quantity.kind];
    const sizes = now.group.answers.flatMap((answer) => (answer.values[key] || []).filter((v) => v !== null).map((v) => Math.abs(to(v))));
    const top = sizes.filter(Number.isFinite).reduce((a, b) => Math.max(a, b), 0);
    for (const { answer, cells } of now.answers.values()) {
      const values = answer.values[key];
      cells.forEach((cell, column) => {
        const value = values ? values[column] : null, found = value === null ? null : tint(to(value), top);
        if (found) cell.dataset.tint = found; else delete cell.dataset.tint;
      });
    }
    grid.dataset.kind = quantity.kind;
    drawLegend(quantity, top, sizes);
  }

  function drawLegend({ key, name, kind, means }, top, sizes) {
    const swatch = (level) => el("span", { class: "swatch", "data-tint": level, "aria-hidden": "true" });
    const range = (sign) => [1, 2, 3, 4, 5].map((level) => swatch(sign + level));
    const { from } = SCALES[kind], two = kind === "signed" || kind === "ratio";
    const scale = !sizes.length ? ["not recorded at this step"]
      : kind === "flag" ? [swatch("+5"), ` ${sizes.filter(Boolean).length} of ${sizes.length} tokens`]
      : top === 0 ? [`${from(0)} on every token of this group`]
      : [two && `${from(-top)} `, ...(two ? range("-").reverse() : []), ` ${from(0)} `, ...range("+"), ` ${from(top)}`];
    legend.replaceChildren(el("strong", {}, name), `: ${means}. `, el("span", { class: "scale", "data-key": key }, ...scale.filter(Boolean)));
  }

  // -- one group ------------------------------------------------------------------------------------------------------

  const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
  const about = (values) => {
    const found = (values || []).filter((v) => v !== null).sort((a, b) => a - b), low = found[0], high = found[found.length - 1];
    return !found.length ? "–" : low === high ? show(low, 3) : `${show(low, 3)} … ${show(high, 3)}`;
  };

  function draw({ at, group }) {
    now = { at, group, answers: new Map() };
    stepBox.value = at;
    groupBox.replaceChildren(...data.steps[at].groups.map((g) => el("option", { value: g.group },
      `${g.group}: rewards ${g.answers.slice(0, 8).map(({ reward }) => show(reward, 2)).join(" ")}${g.answers.length > 8 ? " …" : ""}`)));
    groupBox.value = group.group;
    prompt.textContent = visible(group.prompt);
    grid.replaceChildren(...group.answers.map(drawAnswer));
    drawTree();
  }

  function drawAnswer(answer) {
    const text = el("div", { class: "text", role: "presentation" });
    const box = el("div", { class: "one", role: "row", "data-row": answer.row },
      el("div", { class: "head", role: "rowheader" }, el("strong", {}, `reward ${show(answer.reward)}`),
        ` · A ${about(answer.values.A)} · ${answer.length} tokens`, el("span", { class: "soft" }, ` · rollout ${answer.row}`)), text);
    const drawn = { answer, box, text, cells: [] };
    now.answers.set(answer.row, drawn);
    addTokens(drawn, MOST);
    return box;
  }

  function addTokens({ answer, text, cells }, count) {
    const given = new Set(answer.given), stepAt = new Map();
    for (const step of answer.steps) for (let c = step[1]; c < step[2]; c++) stepAt.set(c, step);
    text.querySelector(".more")?.remove();
    for (let column = cells.length; column < Math.min(count, answer.tokens.length); column++) {
      const piece = data.words[answer.tokens[column]], step = stepAt.get(column);
      const ends = piece.endsWith("\n"); // that break stands behind the token, where no outline draws a bar into the next line
      const cell = el("span", { class: "token", role: "gridcell", tabindex: -1, "data-row": answer.row, "data-token": column },
        ends ? visible(piece).slice(0, -1) : visible(piece));
      if (given.has(column)) cell.classList.add("given");
      if (step && isWrong(step)) cell.classList.add("wrong");
      cells.push(cell);
      const mark = step && column === step[2] - 1 && markOf(step);
      text.append(...[ends && mark, cell, ends ? "\n" : mark].filter(Boolean));
    }
    if (!answer.tokens.length && !answer.rest) text.append(el("span", { class: "soft" }, "⟨empty⟩"));
    text.append(...theRest(answer, cells.length));
  }

  function theRest(answer, drawn) {
    if (drawn < answer.tokens.length) return [el("div", { class: "more", role: "gridcell" }, el("button", { type: "button", on: { click: () => {
      addTokens(now.answers.get(answer.row), Infinity);
      recolour();
    } } }, `show all ${answer.tokens.length} tokens`))];
    const lost = answer.extent - answer.tokens.length;
    return [lost > 0 && el("div", { class: "soft" }, `${lost} more tokens are not in this file`),
      answer.rest && el("div", { class: "given rest" }, visible(answer.rest))].filter(Boolean);
  }

  const isWrong = (step) => !data.graded && step[3] === 0;
  function markOf(step) {
    if (data.graded) return el("span", { class: "mark soft" }, ` step ${step[0] + 1}: ${show(step[3])} `);
    return isWrong(step) && el("span", { class: "mark" }, ` ✗ step ${step[0] + 1} wrong `);
  }

  // -- the tree -------------------------------------------------------------------------------------------------------

  function drawTree() {
    const { tree, answers } = now.group, byRow = new Map(answers.map((answer) => [answer.row, answer]));
    const top = Math.max(0, ...tree.flatMap(([, , , , low, high]) => [Math.abs(low), Math.abs(high)]));
    const below = (parent) => {
      const lines = tree.map((line, i) => [line, i]).filter(([line]) => line[0] === parent);
      return lines.length > 0 && el("ul", {}, ...lines.map(([line, i]) => el("li", {}, drawLine(line), below(i))));
    };
    const drawLine = ([, rows, start, stop, low, high]) => {
      const text = byRow.get(rows[0]).tokens.slice(start, stop).map((word) => data.words[word]).join("");
      const sum = low === null ? "not chosen" : low === high ? `W ${show(low, 3)}` : `W ${show(low, 3)} … ${show(high, 3)}`;
      const far = Math.abs(low) > Math.abs(high) ? low : high;
      return el("button", { type: "button", class: "node", "data-row": rows[0], "data-token": start,
        on: { click: () => { set({ row: rows[0], other: null, token: start }); current()?.focus(); } } },
        el("span", { class: "count" }, `${rows.length} of ${answers.length}`), " ", el("span", { class: "sum", "data-tint": tint(far, top) }, sum),
        " ", el("span", { class: "words" }, (text.length > 90 ? text.slice(0, 90) + "…" : text).replaceAll("\n", "⏎ ")));
    };
    nodes.replaceChildren(el("h3", {}, "Prefix tree"), tree.length ? el("p", { class: "soft" },
      "Answers that share a token share its gradient: it moves by W, the sum of w over the answers that pass. "
      + "0 means that their credits cancel there. A line is a run of tokens that the same answers share.") : "", tree.length ? below(-1)
      : el("p", { class: "missing" }, "No w was recorded, so no sums over shared tokens."));
  }

  // -- one token ------------------------------------------------------------------------------------------------------

  const cellAt = (row, column) => {
    const drawn = now.answers.get(row);
    if (!drawn || !drawn.answer.tokens.length) return null;
    const last = Math.min(Math.max(column, 0), drawn.answer.tokens.length - 1);
    if (last >= drawn.cells.length) { addTokens(drawn, Infinity); recolour(); }
    return drawn.cells[last];
  };
  const current = () => grid.querySelector('.token[tabindex="0"]');
  const rows = () => now.group.answers.filter(({ row, tokens }) => tokens.length && !now.answers.get(row).box.hidden).map(({ row }) => row);

  function select() {
    const row = number("row"), first = rows()[0];
    const cell = cellAt(row, number("token", 0)) || cellAt(first, 0), named = state.row !== undefined && now.answers.has(row);
    const old = current();
    pointed = null;
    if (old) { old.tabIndex = -1; old.removeAttribute("aria-selected"); }
    if (!cell) return panel.replaceChildren("These answers have no tokens.");
    cell.tabIndex = 0;
    panel.classList.toggle("hint", !named);
    if (!named) return panel.replaceChildren(el("p", { class: "soft" }, "Point at a token, or click one and move with the arrow keys."));
    cell.setAttribute("aria-selected", "true");
    describe(cell);
  }

  function describe(cell) {
    panel.classList.remove("hint");
    const { answer } = now.answers.get(Number(cell.dataset.row)), column = Number(cell.dataset.token), chosen = colour();
    const step = answer.steps.find(([, start, stop]) => start <= column && column < stop);
    const line = (name, value, strong) => [el("dt", {}, name), el("dd", strong ? { class: "strong" } : {}, value)];
    const values = answer.given.includes(column) ? [el("p", {}, "Not chosen by the policy: it has no credit.")]
      : [el("dl", {}, ...data.quantities.flatMap(({ key, name, kind }) => answer.values[key]
        ? line(name, kind === "flag" ? SCALES.flag.from(answer.values[key][column]) : show(answer.values[key][column], 4), key === chosen) : []))];
    panel.replaceChildren(el("p", {}, el("span", { class: "token" }, visible(data.words[answer.tokens[column]]).trimEnd() || "␠"),
      ` token ${column + 1} of ${answer.extent}, rollout ${answer.row}`,
      step ? `, step ${step[0] + 1}${data.graded ? ` (reward ${show(step[3])})` : isWrong(step) ? " (wrong)" : " (right)"}` : ""), ...values);
  }

  let pointed = null; // the token that the panel shows because the mouse moved over it
  const tokenOf = (event) => event.target.closest?.(".token[data-token]");
  // Not `pointerover`: that comes too when the page moves under a mouse at rest, and would take the panel from what was clicked.
  grid.addEventListener("pointermove", (event) => {
    const cell = tokenOf(event);
    if (cell && cell !== pointed) describe(pointed = cell);
  });
  grid.addEventListener("pointerleave", () => { if (pointed) select(); });
  grid.addEventListener("focusin", (event) => tokenOf(event) && describe(tokenOf(event)));
  grid.addEventListener("click", (event) => { const cell = tokenOf(event); if (cell) move(Number(cell.dataset.row), Number(cell.dataset.token)); });

  function move(row, token) {
    const cell = cellAt(row, token);
    if (!cell) return;
    set({ row, token: Number(cell.dataset.token) });
    cell.focus();
  }

  /* Arrow keys act on a token; the keys for group and step wherever the view has the focus, but not in its boxes. */
  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
    const cell = tokenOf(event), turns = { "[": () => turn(-1), "]": () => turn(1), ",": () => go(now.at - 1), ".": () => go(now.at + 1) };
    if (turns[event.key]) {
      event.preventDefault();
      turns[event.key]();
      if (!root.contains(document.activeElement)) current()?.focus();
      return;
    }
    if (!cell) return;
    const row = Number(cell.dataset.row), column = Number(cell.dataset.token), all = rows(), seat = all.indexOf(row);
    const to = { ArrowRight: [row, column + 1], ArrowLeft: [row, column - 1], Home: [row, 0], End: [row, Infinity],
      ArrowDown: [all[seat + 1], column], ArrowUp: [all[seat - 1], column] }[event.key];
    if (!to) return;
    event.preventDefault();
    if (to[0] !== undefined) move(...to);
  }

  // -- following the address ------------------------------------------------------------------------------------------

  function tellPlace() {
    const shown = steps[now.at], row = now.answers.get(number("row")), token = number("token");
    const other = (key, is) => state[key] !== undefined && state[key] !== String(is) && state[key].slice(0, 20);
    const [step, group, colours] = [other("step", shown), other("group", now.group.group), other("colour", colour())];
    const pair = [number("row"), number("other")];
    const two = pair[1] !== null && pair.every((row) => now.answers.has(row));
    for (const [row, { box }] of now.answers) box.hidden = two && !pair.includes(row);
    told.replaceChildren(...[
      step && `Step ${step} is not in this file; step ${shown} is ${number("step") === null ? "shown" : "the nearest"}. `,
      group && `Group ${group} of this step is not in this file; group ${now.group.group} is shown. `,
      state.row !== undefined && !row && `Rollout ${state.row.slice(0, 20)} is not in this group. `,
      row && state.token !== undefined && !(token >= 0 && token < row.answer.tokens.length) && `Rollout ${row.answer.row} has no token ${state.token.slice(0, 20)} in this file; the nearest is shown. `,
      colours && `No ${colours} was recorded; the colour is ${quantities.get(colour())?.name ?? "none"}. `,
      two && `${new Set(pair).size} of ${now.group.answers.length} answers shown. `,
      two && el("button", { type: "button", class: "whole", on: { click: () => set({ other: null }) } }, "show the whole group"),
    ].filter(Boolean));
  }

  on(["step", "group", "row", "other", "token", "colour"], () => {
    const to = place(), fresh = !now || to.group !== now.group;
    if (fresh) draw(to);
    tellPlace();
    if (fresh || grid.dataset.colour !== colour()) recolour();
    grid.dataset.colour = colour();
    select();
  });
  // Opened by an address that names a token: that is what it was given for. A page that is loaded again stays where it was.
  const [loaded] = performance.getEntriesByType("navigation");
  if (loaded?.type === "navigate" && now.answers.has(number("row"))) current()?.scrollIntoView({ block: "center" });
});
