/* Charts: `chart` draws a Vega-Lite specification over `rows` into an element, with its picture, its numbers as CSV and
   as a table. Charts over steps share one cursor: moving over one shows the step in all, a click chooses it. */
creditscope.chart = async function (root, spec, { rows = null, name = "chart", note = "", steps = false, columns = null } = {}) {
  const { el, chart } = creditscope;
  const place = el("div", { class: "chart", "data-chart": name });
  root.append(place);
  const numbers = rows && chart.numbers(rows, columns);
  let view = null;
  if (window.vegaEmbed) {
    const data = rows && spec.data?.name === "rows" ? { datasets: { rows } } : {};
    ({ view } = await window.vegaEmbed(place, { ...spec, ...data }, { ast: true, actions: false, renderer: "svg", tooltip: false }));
  } else {
    place.append(el("p", { class: "missing" }, "No charts in this file: pip install 'creditscope[plot]' and make it again."));
  }
  const title = spec.title || name;
  const places = Array.isArray(steps) ? steps : steps ? rows.map((row) => row.step) : [];
  const says = steps && spec.usermeta ? chart.reader(root, spec.usermeta, rows, places.at(-1)) : null;
  if (note) root.append(el("p", { class: "note" }, note));
  const tools = el("div", { class: "tools" },
    view && el("button", { type: "button", "aria-label": `${title}: save as SVG`,
      on: { click: async () => creditscope.save(`${name}.svg`, await view.toSVG(), "image/svg+xml") } }, "SVG"),
    rows && el("button", { type: "button", "aria-label": `${title}: save as CSV`,
      on: { click: () => creditscope.save(`${name}.csv`, creditscope.csv(numbers()), "text/csv") } }, "CSV"));
  root.append(tools);
  if (rows) root.append(chart.table(title, numbers));
  if (steps && (view || says)) chart.link(view, places, says);
  return view;
};

/* The rows with these columns only, and without rows that have none of them. */
creditscope.chart.numbers = (rows, columns) => () => !columns ? rows : rows
  .filter((row) => columns.some((column) => row[column] !== undefined))
  .map((row) => Object.fromEntries(["step", ...columns].map((column) => [column, row[column]])));

/* The numbers as a table, made when it is opened. */
creditscope.chart.table = function (title, numbers) {
  const { el, show } = creditscope;
  const details = el("details", { class: "numbers" }, el("summary", { "aria-label": `${title}: table` }, "table"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const rows = numbers(), columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const cell = (value) => typeof value === "string" ? el("td", {}, value) : el("td", { class: "number" }, show(value));
    details.append(el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": `${title}: table` }, el("table", {},
      el("thead", {}, el("tr", {}, ...columns.map((column) => el("th", { scope: "col" }, column)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...columns.map((column) => cell(row[column]))))))));
  });
  return details;
};

/* A line of text with the numbers at a step, or the newest before it; at the `last` step also what was read after it.
   Returns the function that writes the line. */
creditscope.chart.reader = function (root, { lines, percent }, rows, last) {
  const { el, show } = creditscope;
  const line = el("p", { class: "reading" });
  root.append(line);
  const number = (value) => percent ? show(100 * value, 3) + " %" : show(value, 3);
  const at = (step, { name, low, high }) => {
    const row = rows.findLast((one) => (one.step <= step || step === last) && one[name] !== undefined);
    if (!row) return `${name} –`;
    if (row[name] === null) return `${name} not a number`;
    const interval = row[low] === undefined || row[low] === null ? "" : ` [${number(row[low])}, ${number(row[high])}]`;
    return `${name} ${number(row[name])}${interval}${row.step === step ? "" : `, of step ${row.step}`}`;
  };
  return (step) => { line.textContent = lines.map((one) => at(step, one)).join(" · "); };
};

/* One cursor for all: `places` are the steps at which it may stand. */
creditscope.chart.link = function (view, places, says) {
  const { chart } = creditscope;
  const line = (step) => { if (view) view.signal("chosen", step).runAsync(); if (says && step !== null) says(step); };
  chart.views.push({ line });
  if (view) {
    const area = view.container();
    const nearest = (event) => {
      const picture = area.querySelector("svg"), box = picture.getBoundingClientRect();
      const pixels = picture.viewBox.baseVal.width / box.width; // the picture shrinks with a narrow page
      return chart.nearest(places, view.scale("x").invert((event.clientX - box.left) * pixels - view.origin()[0]));
    };
    area.addEventListener("pointermove", (event) => chart.point(nearest(event)));
    area.addEventListener("pointerleave", () => chart.point(chart.at));
    area.addEventListener("click", (event) => creditscope.set({ step: nearest(event) }));
  }
  line(chart.at ?? creditscope.number("step"));
};
creditscope.chart.views = [];
creditscope.chart.at = null; // the step at which the cursor rests
creditscope.chart.point = (step) => creditscope.chart.views.forEach(({ line }) => line(step));
creditscope.chart.nearest = (places, at) => places.reduce((best, step) => Math.abs(step - at) < Math.abs(best - at) ? step : best, places[0]);
