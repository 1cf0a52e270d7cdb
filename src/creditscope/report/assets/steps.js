/* Charts over steps, and the bar that chooses the step which the page below shows. */
creditscope.section("steps", async (root, { charts, steps, table }) => {
  const { el, on, set, number, chart } = creditscope;
  const rows = creditscope.unpacked(table);
  const go = (by) => set({ step: steps[Math.min(Math.max(Number(slider.value) + by, 0), steps.length - 1)] });
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, id: "step",
    on: { input: () => set({ step: steps[slider.value] }) } });
  const told = el("output", { for: "step", id: "step-told" });
  const spoken = el("p", { class: "spoken", "aria-live": "polite", id: "step-spoken" });
  const grid = el("div", { class: "charts" });
  root.querySelector("#steps-charts").append(
    el("div", { class: "bar" }, el("label", { for: "step" }, "Step"),
      el("button", { type: "button", id: "step-back", "aria-label": "previous step", on: { click: () => go(-1) } }, "‹"), slider,
      el("button", { type: "button", id: "step-on", "aria-label": "next step", on: { click: () => go(1) } }, "›"), told), spoken, grid);
  for (const { name, spec, columns, note } of charts) {
    const figure = el("figure", { class: "figure", id: `chart-${name}` });
    grid.append(figure);
    await chart(figure, spec, { rows, columns, name, note, steps });
  }
  let begun = false;
  const ends = `${steps[0]}–${steps[steps.length - 1]}`;
  let chosen = null;
  const tell = (step) => { told.textContent = step === chosen ? `step ${step} (${ends})` : `step ${step} (chosen: ${chosen})`; };
  chart.views.push({ line: (step) => { if (step !== null) tell(step); } });
  on(["step"], () => {
    const nearest = chart.nearest(steps, number("step", steps[steps.length - 1]));
    slider.value = steps.indexOf(nearest);
    slider.setAttribute("aria-valuetext", `step ${nearest}`);
    chosen = chart.at = nearest;
    chart.point(nearest);
    const said = [...grid.querySelectorAll(".reading")].map((line) => line.textContent);
    if (begun) spoken.textContent = `Step ${nearest}: ${said.join("; ")}`;
    begun = true;
  });
});

/* A table by columns as an array of rows; a column that a row lacks is undefined there, one that is not a number null. */
creditscope.unpacked = function ({ step, columns }) {
  const rows = step.map((one) => ({ step: one }));
  for (const [name, { values, at }] of Object.entries(columns)) values.forEach((value, i) => { rows[at ? at[i] : i][name] = value; });
  return rows;
};
