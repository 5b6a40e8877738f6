const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const form = find("form");
if (form) {
  const wait = (looking) => Object.assign(find("button", form), { disabled: looking, textContent: looking ? "Looking …" : "Look inside" });
  form.addEventListener("submit", () => wait(true));
  addEventListener("pageshow", () => wait(false));
  form.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}
const word = (number) => data.texts[number];
const quoted = (number) => "“" + word(number).trim() + "”";

const sides = (data.sides || []).map((side, index) => {
  const strips = all(".strip");
  const grid = find(`table[data-side="${index}"]`);
  const attention = find(`.attention[data-side="${index}"]`);
  return {
    ...side,
    n: side.tokens.length,
    bytes: unpacked(side.maps),
    strip: all(".tok", strips[Math.min(index, strips.length - 1)]),
    box: grid.parentElement,
    rows: all("tbody tr", grid).map((row) => all("td", row)),
    columns: all("thead th", grid).slice(1),
    names: all("tbody th", grid),
    detail: find(`.detail[data-side="${index}"]`),
    layers: all(".layers button", attention),
    heads: all(".heads button", attention),
    map: find(".map", attention),
    look: find(".look", attention),
    says: find(".says", attention),
    at: side.tokens.length - 1,
    point: side.points.length - 1,
    head: 0,
  };
});

// What is chosen on one side is chosen on the other, where the two correspond.
const alike = (key) => sides.length < 2 || JSON.stringify(sides[0][key]) === JSON.stringify(sides[1][key]);
const linked = { at: alike("tokens"), point: alike("points"), head: alike("n_head") };

function choose(side, changes) {
  for (const other of sides) {
    for (const [key, value] of Object.entries(changes)) if (other === side || linked[key]) other[key] = value;
  }
  sides.forEach(draw);
}

const weights = (side, layer, head, at) => attentionRow(side.bytes, side.n, layer * side.n_head + head, at);

function paint(canvas, side, layer, head, cursor) {
  const scale = cursor ? Math.max(1, Math.ceil(480 / side.n)) : 1;
  canvas.width = canvas.height = side.n * scale;
  const pen = canvas.getContext("2d");
  const colour = (name) => getComputedStyle(side.map).getPropertyValue(name).trim();
  pen.fillStyle = colour("--tone");
  for (let row = 0; row < side.n; row++) {
    weights(side, layer, head, row).forEach((weight, column) => {
      pen.globalAlpha = Math.sqrt(weight);
      pen.fillRect(column * scale, row * scale, scale, scale);
    });
  }
  if (cursor) {
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(1, side.at * scale, canvas.width - 2, scale);
  }
}

function mark(elements, chosen, attribute) {
  elements.forEach((one, index) => {
    one.setAttribute(attribute, String(index === chosen));
    one.tabIndex = index === chosen ? 0 : -1;
  });
}

function detail(side) {
  const [top, entropy, given, rank] = side.readings[side.point][side.at];
  const last = side.point === side.points.length - 1;
  const title = element("h4", "", "After ");
  title.append(element("q", "word", side.tokens.slice(Math.max(0, side.at - 3), side.at + 1).map(word).join("")));
  title.append(last ? ", its answer" : side.point ? `, read after ${side.points[side.point]}` : ", before any layer");
  const list = element("ol");
  const next = side.tokens[side.at + 1];
  for (let i = 0; i < top.length; i += 2) {
    const row = element("li", top[i] === next ? "right" : ""), holder = element("span"), bar = element("span", "bar");
    bar.style.setProperty("--p", top[i + 1] || 0);
    holder.append(bar);
    row.append(element("span", "", word(top[i])), holder, element("span", "", chance(top[i + 1])));
    list.append(row);
  }
  const goes = next === undefined ? "" : `The text goes on with ${quoted(next)}: ${chance(given)}, its choice number ${rank}. `;
  const apart = data.js && last ? ` A and B differ here by ${data.js[side.at]?.toPrecision(2) ?? "–"} nats (Jensen-Shannon).` : "";
  find("div", side.detail).replaceChildren(title, list);
  find("p", side.detail).textContent = `${goes}Entropy ${entropy?.toFixed(2) ?? "–"} nats.${apart}`;
}

// The chosen cell into sight, past the column that stays; sideways only, so that the page does not jump.
function reveal(side) {
  const cell = side.rows[side.point][side.at], box = side.box, kept = side.names[0].offsetWidth;
  if (cell.offsetLeft - kept < box.scrollLeft) box.scrollLeft = cell.offsetLeft - kept;
  const beyond = cell.offsetLeft + cell.offsetWidth - box.clientWidth;
  if (beyond > box.scrollLeft) box.scrollLeft = beyond;
}

// Which tokens are in sight, where a table is wider than its place.
function sight(side) {
  const { scrollLeft: from, clientWidth: width, scrollWidth: whole } = side.box, says = side.box.nextElementSibling;
  const seen = side.columns.flatMap(({ offsetLeft: left, offsetWidth: own }, at) =>
    left >= from + side.names[0].offsetWidth - 1 && left + own <= from + width + 1 ? [at + 1] : []);
  side.box.classList.toggle("before", from > 1);
  side.box.classList.toggle("behind", from + width < whole - 1);
  says.hidden = whole <= width + 1;
  says.textContent = `Tokens ${seen[0]} to ${seen.at(-1)} of ${side.n}; scroll sideways for the others.`;
}

// The text, coloured by where token ``at`` looks.
function look(side, at) {
  const layer = Math.max(0, side.point - 1), row = weights(side, layer, side.head, at);
  colourByAttention(side.words, row, at, 100, 0.45);
  const seen = mostSeen(row, 4, (index) => quoted(side.tokens[index]));
  side.says.textContent = `In h.${layer}, head ${side.head}, ${quoted(side.tokens[at])} looks at ${seen}.`;
}

function draw(side) {
  const layer = Math.max(0, side.point - 1);
  mark(side.strip, side.at, "aria-selected");
  mark(side.rows.flat(), side.point * side.n + side.at, "aria-selected");
  side.columns.forEach((column, at) => column.classList.toggle("on", at === side.at));
  side.names.forEach((name, point) => name.classList.toggle("on", point === side.point));
  reveal(side);
  sight(side);
  detail(side);
  mark(side.layers, layer, "aria-checked");
  mark(side.heads, side.head, "aria-checked");
  if (side.drawn !== layer) {
    side.heads.forEach((button, head) => paint(find("canvas", button), side, layer, head, false));
    side.drawn = layer;
  }
  paint(side.map, side, layer, side.head, true);
  look(side, side.at);
  side.map.setAttribute("aria-label", `Attention of h.${layer}, head ${side.head}: a row a token, ${side.n} by ${side.n}`);
}

for (const side of sides) {
  side.words = side.strip.map((token) => side.look.appendChild(element("span", token.className)));
  side.words.forEach((made, at) => {
    made.replaceChildren(...side.strip[at].cloneNode(true).childNodes);
    made.addEventListener("click", () => choose(side, { at }));
  });
  walk(side.layers, 1, (layer) => choose(side, { point: layer + 1 }));
  side.box.addEventListener("scroll", () => sight(side));
  const across = () => getComputedStyle(side.heads[0].parentElement).gridTemplateColumns.split(" ").length;
  walk(side.heads, across, (head) => choose(side, { head }));
  walk(side.rows.flat(), side.n, (index) => choose(side, { point: Math.floor(index / side.n), at: index % side.n }));
  side.map.addEventListener("click", (event) => {
    const at = Math.floor((event.offsetY / side.map.clientHeight) * side.n);
    choose(side, { at: Math.max(0, Math.min(side.n - 1, at)) });
  });
  // Pointing at a token shows where it looks, for as long as one points at it.
  side.words.forEach((token, at) => {
    token.addEventListener("pointerenter", () => look(side, at));
    token.addEventListener("pointerleave", () => look(side, side.at));
  });
}
// One strip stands for both sides where their tokens are the same.
for (const side of new Map(sides.map((side) => [side.strip[0], side]).reverse()).values()) walk(side.strip, side.n, (at) => choose(side, { at }));
addEventListener("resize", () => sides.forEach((side) => (reveal(side), sight(side))));
const repaint = () => sides.forEach((side) => draw(Object.assign(side, { drawn: undefined })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
repaint();
