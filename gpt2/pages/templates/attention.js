"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tokens = [...document.querySelectorAll(".look .tok")];
const [model, layer, head] = ["model", "layer", "head"].map((id) => document.getElementById(id));
const says = document.getElementById("says");
const n = data.tokens.length, size = (n * (n + 1)) / 2;
const bytes = {};
for (const [side, text] of Object.entries(data.maps)) bytes[side] = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
let at = n - 1;

function draw() {
  if (!model) return;
  const start = (Number(layer.value) * data.heads + Number(head.value)) * size + (at * (at + 1)) / 2;
  const row = [...bytes[model.value].subarray(start, start + at + 1)].map((b) => b / 255);
  tokens.forEach((token, index) => {
    token.style.setProperty("--x", index <= at ? Math.round(90 * Math.sqrt(row[index])) : 0);
    token.style.opacity = index <= at ? 1 : 0.4;
    token.classList.toggle("on", index === at);
  });
  const best = row.map((weight, index) => [weight, index]).sort((x, y) => y[0] - x[0] || x[1] - y[1]).slice(0, 5);
  const told = best.filter(([weight]) => weight > 0.005).map(([weight, index]) => "“" + data.tokens[index] + "” " + Math.round(100 * weight) + " %");
  says.textContent = "“" + data.tokens[at] + "” looks at " + (told.join(", ") || "nothing in particular");
}

tokens.forEach((token, index) => {
  for (const event of ["pointerover", "focus", "click"]) token.addEventListener(event, () => { at = index; draw(); });
  token.addEventListener("keydown", (event) => {
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: n - 1 }[event.key];
    if (to === undefined || !tokens[to]) return;
    event.preventDefault();
    tokens[to].focus();
  });
});
for (const choice of [model, layer, head]) if (choice) choice.addEventListener("change", draw);
draw();
