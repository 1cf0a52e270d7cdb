/* Settings side by side: charts over steps with one cursor, and a table that sorts by the heading that is pressed. */
creditscope.section("compare", async (root, { charts }) => {
  const { el } = creditscope;
  creditscope.sortable(root.querySelector("#settings"));
  const states = document.getElementById("states");
  if (states) creditscope.sortable(states);
  const grid = el("div", { class: "charts" });
  root.append(grid);
  for (const { name, spec, rows, note, steps } of charts) {
    const figure = el("figure", { class: "figure" });
    grid.append(figure);
    await creditscope.chart(figure, spec, { rows, name, steps });
    if (note) figure.append(el("figcaption", { class: "soft" }, note));
  }
});

/* Headings become buttons. A cell sorts by its data-value, else by its text; what is no number comes last. */
creditscope.sortable = function (table) {
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const number = (cell) => { const text = cell.dataset.value ?? cell.textContent; return text.trim() === "" ? NaN : Number(text); };
  const order = (a, b) => {
    const x = number(a), y = number(b);
    if (Number.isNaN(x) && Number.isNaN(y)) return a.textContent.localeCompare(b.textContent);
    return Number.isNaN(x) ? 1 : Number.isNaN(y) ? -1 : x - y;
  };
  headings.forEach((heading, column) => {
    const button = creditscope.el("button", { type: "button", class: "sort" }, ...heading.childNodes);
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => order(a.cells[column], b.cells[column]));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
};
