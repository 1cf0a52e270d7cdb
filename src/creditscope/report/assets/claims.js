/* Claims by verdict: a pressed button shows the cards that have it, and opens what is folded up if they are there. */
creditscope.section("claims", (root, { counts }) => {
  const buttons = [...root.querySelectorAll("#claims-filter button")];
  const folded = ["claims-undecided", "claims-untested"].map((id) => document.getElementById(id)).filter(Boolean);
  const untested = document.getElementById("claims-untested");
  for (const button of buttons) {
    const word = button.dataset.verdict;
    if (word in counts) button.append(` (${counts[word]})`);
    button.addEventListener("click", () => creditscope.set({ verdict: word === "all" ? null : word }));
  }
  creditscope.on(["verdict"], ({ verdict }) => {
    const chosen = verdict in counts ? verdict : "all";
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.verdict === chosen));
    for (const card of root.querySelectorAll(".claim")) {
      card.hidden = chosen !== "all" && !card.dataset.verdict.split(" ").includes(chosen);
    }
    for (const part of folded) {
      part.hidden = chosen !== "all" && chosen !== "undecided";
      if (chosen === "undecided" && part !== untested) part.open = true;
    }
  });
});
