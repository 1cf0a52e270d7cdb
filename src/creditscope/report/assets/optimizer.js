/* The optimiser: charts over steps, and at the chosen step the update under other scales of the credit. */
creditscope.section("optimizer", async (root, { charts, sweeps, sweep }) => {
  const { el, on, number, show, chart } = creditscope;
  const grid = root.querySelector("#optimizer-charts");
  if (sweep) await drawSweep();
  for (const { name, spec, rows } of charts) {
    const figure = el("figure", { class: "figure", id: `optimizer-${name}` });
    grid.append(figure);
    await chart(figure, spec, { rows, name, steps: rows.map((row) => row.step) });
  }

  async function drawSweep() {
    const steps = sweeps.map((one) => one.step), rows = [];
    const figure = el("figure", { class: "figure", id: "optimizer-sweep" }), told = el("figcaption", { class: "soft" });
    const list = root.querySelector("#optimizer-layers");
    grid.append(figure);
    const at = () => sweeps[steps.indexOf(chart.nearest(steps, number("step", steps[steps.length - 1])))];
    const fill = (one) => rows.splice(0, rows.length, ...one.phi.map((phi, i) => ({ phi, cosine: one.cosine[i], change: one.change[i], layers_least: one.low[i], layers_most: one.high[i] })));
    fill(at());
    const view = await chart(figure, sweep, { rows, name: "credit-scale" });
    figure.append(told);
    on(["step"], () => {
      const one = at(), unknown = one.change.filter((value) => value === null).length;
      fill(one);
      if (view) view.data("rows", rows.slice()).runAsync();
      const numbers = figure.querySelector("details");
      if (numbers) { numbers.open = false; numbers.querySelector(".wide")?.remove(); } // those of the last step
      told.textContent = `At step ${one.step}, ${one.since === "now" ? "scaled from this step on" : "scaled since the start"}.${unknown ? ` At ${unknown} scales the state does not say, as gradients were clipped to a norm.` : ""}`;
      list.replaceChildren(...(one.layers.length ? [table(one)] : []));
    });
  }

  function table({ step, layers }) {
    const title = `Layers that change most at credit × 0.1, step ${step}`;
    return el("details", {}, el("summary", {}, title), el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": title }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "parameter"), ...["change", "cosine", "‖Δ‖ / ‖θ‖"].map((name) => el("th", { scope: "col", class: "number" }, name)))),
      el("tbody", {}, ...layers.map(([name, ...values]) => el("tr", {}, el("th", { scope: "row", class: "mono" }, name), ...values.map((value) => el("td", { class: "number" }, show(value)))))))));
  }
});
