// GPT-2 in nested arrays with one matrix product, a batch of sequences one after another.
// node nested.js IN.json OUT.json; IN holds weights, heads, batch (B, T) and faults, OUT every value (B, ...) by name.
const fs = require("fs");
const given = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const w = given.weights;
const bad = new Set(given.faults);
const H = given.heads;

const turn = (a) => a[0].map((_, j) => a.map((row) => row[j]));
const product = (a, b) => {
  const columns = turn(b);
  return a.map((row) => columns.map((column) => row.reduce((sum, value, i) => sum + value * column[i], 0)));
};
const plus = (a, b) => a.map((row, i) => row.map((value, j) => value + b[i][j]));
const shifted = (a, bias) => a.map((row) => row.map((value, j) => value + bias[j]));
const times = (a, factor) => a.map((row) => row.map((value) => value * factor));
const slice = (a, from, to) => a.map((row) => row.slice(from, to));

function softmax(row) {
  const top = Math.max(...row);
  const powers = row.map((value) => Math.exp(value - top));
  const sum = powers.reduce((x, y) => x + y, 0);
  return powers.map((value) => value / sum);
}

function normed(a, name) {
  const gain = w[name + ".weight"], shift = w[name + ".bias"];
  return a.map((row) => {
    const mean = bad.has("rms") ? 0 : row.reduce((x, y) => x + y, 0) / row.length;
    const spread = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / row.length;
    const eps = bad.has("no eps") ? 0 : bad.has("eps 1e-3") ? 1e-3 : 1e-5;
    if (bad.has("not normalised")) return row.map((value, j) => value * gain[j] + shift[j]);
    return row.map((value, j) => ((value - mean) / Math.sqrt(spread + eps)) * gain[j] + shift[j]);
  });
}

function activation(x) {
  if (bad.has("silu")) return x / (1 + Math.exp(-x));
  if (bad.has("root missing")) return 0.5 * x * (1 + Math.tanh((2 / Math.PI) * (x + 0.044715 * x ** 3)));
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

function linear(a, name, biased = true) {
  const y = product(a, w[name + ".weight"]);
  return biased ? shifted(y, w[name + ".bias"]) : y;
}

function forward(ids, keep) {
  const T = ids.length, C = w["wte.weight"][0].length, K = C / H;
  let x = ids.map((id) => w["wte.weight"][id]);
  if (bad.has("embedding doubled")) x = times(x, 2);
  if (!bad.has("no positions")) {
    const base = bad.has("position 3") ? 3 : 0;
    x = plus(x, ids.map((_, t) => (bad.has("sines") ? sines(t, C) : w["wpe.weight"][t + base])));
  }
  keep("embedded", x);
  for (let n = 0; w[`h.${n}.ln_1.weight`]; n++) {
    const name = `h.${n}.`;
    const a = normed(x, name + "ln_1");
    keep(n + " a", a);
    const all = linear(a, name + "attn.c_attn", !bad.has("no bias of qkv"));
    const order = bad.has("order k q v") ? [1, 0, 2] : bad.has("order v k q") ? [2, 1, 0] : [0, 1, 2];
    const [q, k, v] = order.map((i) => slice(all, i * C, (i + 1) * C));
    const heads = [];
    for (let h = 0; h < H; h++) {
      const own = (m) => bad.has("rows of units") ? m.map((row) => row.filter((_, j) => j % H === h)) : slice(m, h * K, (h + 1) * K);
      const qh = own(q), kh = own(k), vh = own(v);
      const factor = bad.has("unscaled") ? 1 : bad.has("size not rooted") ? 1 / K : 1 / Math.sqrt(K);
      const scores = times(product(qh, turn(kh)), factor);
      const hidden = (i, j) => (bad.has("strict") ? j >= i && j > 0 : bad.has("one ahead") ? j > i + 1 : j > i);
      let chance;
      if (bad.has("mask after")) chance = scores.map((row, i) => softmax(row).map((value, j) => (hidden(i, j) ? 0 : value)));
      else if (bad.has("all seen")) chance = scores.map(softmax);
      else chance = scores.map((row, i) => softmax(row.map((value, j) => (hidden(i, j) ? -1e9 : value))));
      heads.push({ qh, kh, vh, scores, chance, out: product(chance, vh) });
    }
    for (const key of ["qh", "kh", "vh", "scores", "chance", "out"]) keep(`${n} ${key}`, heads.map((head) => head[key]));
    const joined = ids.map((_, t) => heads.flatMap((head) => head.out[t]));
    keep(n + " joined", joined);
    const attention = bad.has("projection left out") ? joined : linear(joined, name + "attn.c_proj");
    keep(n + " attention", attention);
    const middle = bad.has("stream doubled") ? plus(times(x, 2), attention) : bad.has("no skip") ? attention : plus(x, attention);
    keep(n + " middle", middle);
    const b = normed(bad.has("side by side") ? x : middle, name + (bad.has("ln_1 again") ? "ln_1" : "ln_2"));
    keep(n + " b", b);
    const inner = linear(b, name + "mlp.c_fc");
    const active = inner.map((row) => row.map(activation));
    keep(n + " inner", inner);
    keep(n + " active", active);
    const out = linear(active, name + "mlp.c_proj", !bad.has("no last bias"));
    keep(n + " forward", out);
    x = plus(bad.has("skip from norm") ? b : middle, out);
    keep(n + " block", x);
  }
  const last = bad.has("no final norm") ? x : normed(x, "ln_f");
  keep("last", last);
  const logits = product(last, turn(w["wte.weight"]));
  keep("logits", bad.has("cold") ? times(logits, 1 / Math.sqrt(C)) : logits);
}

function sines(t, C) {
  return Array.from({ length: C }, (_, j) => {
    const angle = t / 10000 ** ((2 * Math.floor(j / 2)) / C);
    return j % 2 ? Math.cos(angle) : Math.sin(angle);
  });
}

const kept = {};
for (const ids of given.batch) forward(ids, (name, value) => (kept[name] ??= []).push(value));
fs.writeFileSync(process.argv[3], JSON.stringify(kept));
