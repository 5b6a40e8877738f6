"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

const element = (tag, name = "", text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });

function chance(p) {
  if (p === null || p === 0) return p === 0 ? "0 %" : "–";
  return p < 0.0001 ? "< 0.01 %" : (100 * p).toFixed(p < 0.01 ? 2 : 1) + "\u00a0%";
}

const unpacked = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

// Attention weights of row ``at`` of a head, 0 to 1: of each head, the rows of the lower triangle lie one behind the other.
function attentionRow(bytes, n, head, at) {
  const start = head * ((n * (n + 1)) / 2) + (at * (at + 1)) / 2;
  return [...bytes.subarray(start, start + at + 1)].map((b) => b / 255);
}

// Colour tokens by the weights of one row; tokens after ``at`` are pale.
function colourByAttention(tokens, row, at, strongest, pale) {
  tokens.forEach((token, index) => {
    token.style.setProperty("--x", index <= at ? Math.round(strongest * Math.sqrt(row[index])) : 0);
    token.style.opacity = index <= at ? 1 : pale;
    token.classList.toggle("on", index === at);
  });
}

// The tokens with the largest weights, for a sentence.
function mostSeen(row, count, quote) {
  const best = row.map((weight, index) => [weight, index]).sort((x, y) => y[0] - x[0] || x[1] - y[1]).slice(0, count);
  const named = best.filter(([weight]) => weight > 0.005).map(([weight, index]) => `${quote(index)} ${Math.round(100 * weight)}\u00a0%`);
  return named.join(", ") || "nothing in particular";
}

// Arrow keys, Home and End within a list of elements in rows of ``step``; one of them is chosen.
function walk(elements, step, pick) {
  elements.forEach((one, index) => {
    one.addEventListener("click", () => pick(index));
    one.addEventListener("keydown", (event) => {
      const across = typeof step === "function" ? step() : step;
      const keys = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -index, End: elements.length - 1 - index };
      if (keys[event.key] === undefined) return;
      event.preventDefault();
      const to = index + keys[event.key];
      if (!elements[to]) return;
      pick(to);
      elements[to].focus();
    });
  });
}
