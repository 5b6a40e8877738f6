const tokens = [...document.querySelectorAll(".look .tok")];
const [model, layer, head] = ["model", "layer", "head"].map((id) => document.getElementById(id));
const says = document.getElementById("says");
const n = data.tokens.length;
const bytes = {};
for (const [side, text] of Object.entries(data.maps)) bytes[side] = unpacked(text);
let at = n - 1;

function draw() {
  const row = attentionRow(bytes[model.value], n, Number(layer.value) * data.heads + Number(head.value), at);
  const quoted = (index) => "“" + data.tokens[index] + "”";
  colourByAttention(tokens, row, at, 90, 0.4);
  says.textContent = `${quoted(at)} looks at ${mostSeen(row, 5, quoted)}`;
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
for (const choice of [model, layer, head]) choice.addEventListener("change", draw);
draw();
