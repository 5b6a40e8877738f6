const tip = document.getElementById("tip");
let shown = null;

function row(name, text, p) {
  const made = element("div", "row" + (name ? " " + name : ""));
  made.append(element("span", "", text), element("span", "", chance(p)));
  return made;
}

function show(token) {
  if (token === shown) return;
  hide();
  shown = token;
  token.classList.add("on");
  token.setAttribute("aria-describedby", "tip");
  const [text, js, pa, pb, a, b] = JSON.parse(token.dataset.tip);
  const names = JSON.parse(token.parentElement.dataset.names);
  const head = element("div", "word");
  head.append(element("b", "", text), element("span", "", "JS " + js));
  const columns = element("div", "cols");
  [[pa, a, "a"], [pb, b, "b"]].forEach(([p, top, side], index) => {
    const column = element("div");
    column.append(element("div", "who " + side, names[index]));
    for (const [choice, q] of top) column.append(row(choice === text && Math.abs(q - p) <= 0.002 * p ? "right" : "", choice, q));
    column.append(row("rest", "the text’s", p));
    columns.append(column);
  });
  tip.replaceChildren(head, columns);
  tip.hidden = false;
  const at = token.getClientRects()[0], box = tip.getBoundingClientRect();
  const left = Math.max(12, Math.min(at.left - 20, document.documentElement.clientWidth - box.width - 12));
  const below = at.bottom + 10 + box.height <= window.innerHeight;
  tip.style.left = left + "px";
  tip.style.top = (below ? at.bottom + 8 : Math.max(8, at.top - box.height - 8)) + "px";
}

function hide() {
  if (shown) {
    shown.classList.remove("on");
    shown.removeAttribute("aria-describedby");
  }
  shown = null;
  tip.hidden = true;
}

const tokenOf = (event) => (event.target.closest ? event.target.closest(".tok") : null);
document.addEventListener("pointerover", (event) => {
  const token = tokenOf(event);
  if (token) show(token);
  else if (event.pointerType === "mouse") hide();
});
document.addEventListener("click", (event) => {
  const token = tokenOf(event);
  if (token) show(token);
  else hide();
});
document.addEventListener("focusin", (event) => {
  const token = tokenOf(event);
  if (!token) return;
  for (const other of token.parentElement.querySelectorAll(".tok[tabindex='0']")) other.tabIndex = -1;
  token.tabIndex = 0;
  if (token.matches(":focus-visible")) show(token);
});
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
for (const text of document.querySelectorAll("[data-names]")) walk([...text.children], 10, () => {});
document.addEventListener("scroll", hide, { capture: true, passive: true });
