"use strict";
// Bring the highlighted nodes into view in drawings that are wider or taller than their box.
for (const canvas of document.querySelectorAll(".canvas")) {
  const marked = [".snapshot", ".added", ".state-passing", ".blamed"]
    .map((role) => [...canvas.querySelectorAll(".node" + role)])
    .find((nodes) => nodes.length);
  if (!marked) continue;
  const box = canvas.getBoundingClientRect();
  const frames = marked.map((node) => node.getBoundingClientRect());
  const middle = (low, high) => (Math.min(...frames.map((f) => f[low])) + Math.max(...frames.map((f) => f[high]))) / 2;
  canvas.scrollLeft += middle("left", "right") - (box.left + box.width / 2);
  canvas.scrollTop += middle("top", "bottom") - (box.top + box.height / 2);
}
// A chosen node says what it is and where it comes from.
for (const section of document.querySelectorAll("section")) {
  const details = section.querySelector(".details");
  const nodes = [...section.querySelectorAll(".node")];
  const choose = (node) => {
    for (const other of nodes) other.classList.toggle("chosen", other.dataset.name === node.dataset.name);
    const { name, op, result, role, source, code } = node.dataset;
    details.replaceChildren(...[`${name} = ${op}`, result, role === "other" ? "" : role, source, code].filter(Boolean).map((text) => {
      const line = document.createElement("code");
      line.textContent = text;
      return line;
    }));
    details.hidden = false;
    const hidden = node.getBoundingClientRect().bottom - details.getBoundingClientRect().top + 12;
    if (hidden > 0) scrollBy({ top: hidden });
  };
  for (const node of nodes) {
    node.addEventListener("click", () => choose(node));
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(node);
    });
  }
}
