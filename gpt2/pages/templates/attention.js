const tokens = [...document.querySelectorAll(".look .tok")];
const [model, layer, head] = ["model", "layer", "head"].map((id) => document.getElementById(id));
const says = document.getElementById("says");
const n = data.tokens.length;
const bytes = Object.fromEntries(Object.entries(data.maps).map(([side, text]) => [side, unpacked(text)]));
let at = n - 1;

function draw() {
  const row = attentionRow(bytes[model.value], n, Number(layer.value) * data.heads + Number(head.value), at);
  const quoted = (index) => "“" + data.tokens[index] + "”";
  colourByAttention(tokens, row, at, 90, 0.4);
  says.textContent = `${quoted(at)} looks at ${mostSeen(row, 5, quoted)}`;
}

const look = (index) => { at = index; draw(); };
walk(tokens, 1, look);
tokens.forEach((token, index) => token.addEventListener("pointerover", () => look(index)));
for (const choice of [model, layer, head]) choice.addEventListener("change", draw);
draw();
