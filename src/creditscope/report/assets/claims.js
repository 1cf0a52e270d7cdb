/* Claims by verdict: a pressed button shows the cards that have it, and opens what is folded up if they are there. */
creditscope.section("claims", (root, { counts }) => {
  const buttons = [...root.querySelectorAll("#claims-filter button")];
  const folded = ["claims-undecided", "claims-untested"].map((id) => document.getElementById(id)).filter(Boolean);
  const untested = document.getElementById("claims-untested"), exact = document.getElementById("claims-exact");
  const none = creditscope.el("p", { class: "soft", role: "status", id: "claims-none" });
  document.getElementById("claims-filter").after(none);
  for (const button of buttons) {
    const word = button.dataset.verdict;
    if (Object.hasOwn(counts, word)) button.append(` (${counts[word]})`);
    button.addEventListener("click", () => creditscope.set({ verdict: word === "all" ? null : word }));
  }
  creditscope.on(["verdict"], ({ verdict }) => {
    const chosen = Object.hasOwn(counts, verdict) ? verdict : "all";
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.verdict === chosen));
    for (const card of root.querySelectorAll(".claim")) {
      card.hidden = chosen !== "all" && !card.dataset.verdict.split(" ").includes(chosen);
    }
    none.textContent = counts[chosen] === 0 ? `No claim ${chosen === "holds" ? chosen : `is ${chosen}`} by what is here.` : "";
    if (exact) exact.hidden = chosen !== "all"; // a run decides none of those
    for (const part of folded) {
      part.hidden = chosen !== "all" && chosen !== "undecided";
      if (chosen === "undecided" && part !== untested) part.open = true;
    }
  });
});
