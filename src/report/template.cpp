// One page, light and dark, that loads nothing.
#include "report/template.h"

namespace plumb::report {

const char* const kTemplate = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plumb run</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #f7f6f3; --card: #ffffff; --ink: #1d2129; --soft: #6c7280; --line: #e6e4de; --grid: #efede8;
  --accent: #2f6f8f; --accent2: #c2703d; --good: #2e7d5b; --bad: #b5483f; --fill: rgba(47,111,143,.10);
  --c0: #2f6f8f; --c1: #c2703d; --c2: #5b7f3a; --c3: #8a5a9e; --c4: #b58a1b; --c5: #4d5b8c; --c6: #a34d64; --c7: #3f8f86;
  --shadow: 0 1px 2px rgba(20,24,33,.05), 0 6px 24px -12px rgba(20,24,33,.12);
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1c2027; --ink: #e9e7e2; --soft: #969daa; --line: #2b313b; --grid: #262b34;
    --accent: #73b7d6; --accent2: #e2a072; --good: #6fc79d; --bad: #e98a80; --fill: rgba(115,183,214,.13);
    --c0: #73b7d6; --c1: #e2a072; --c2: #a3c77f; --c3: #c39ad6; --c4: #dcbc63; --c5: #93a3dc; --c6: #e092a8; --c7: #7fcfc5;
    --shadow: none;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", "Inter", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 44px 24px 56px; }
header { display: flex; align-items: flex-start; gap: 18px; margin-bottom: 26px; }
header svg { flex: none; margin-top: 4px; }
h1 { font-size: 27px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 4px; font-weight: 650; text-wrap: balance; }
header p { margin: 0; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(5, 1fr); background: var(--card); border: 1px solid var(--line);
  border-radius: 14px; box-shadow: var(--shadow); margin-bottom: 18px; }
.tile { padding: 17px 20px 15px; border-left: 1px solid var(--line); min-width: 0; }
.tile:first-child { border-left: 0; }
.tile b { display: block; font-size: 25px; font-weight: 620; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile b small { font-size: 14px; font-weight: 500; color: var(--soft); letter-spacing: 0; margin-left: 5px; }
.tile span, .card h2 { font-size: 13px; color: var(--soft); font-weight: 550; }
.tile i { display: block; font-style: normal; font-size: 12.5px; color: var(--soft); margin-top: 1px; }
.grid { display: grid; grid-template-columns: repeat(6, 1fr); gap: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 16px 18px 12px;
  box-shadow: var(--shadow); min-width: 0; }
.wide { grid-column: 1 / -1; } .half { grid-column: span 3; } .third { grid-column: span 2; }
.card h2 { margin: 0 0 8px; display: flex; gap: 12px; align-items: baseline; color: var(--ink); font-size: 14px; }
.card h2 em { font-style: normal; color: var(--soft); font-weight: 400; font-size: 13px; }
.card h2 .keys { margin-left: auto; display: flex; gap: 12px; color: var(--soft); font-weight: 400; font-size: 12.5px; }
.keys s { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 5px; }
.card h2 button { margin-left: auto; font: inherit; font-size: 12px; font-weight: 500; color: var(--soft); cursor: pointer;
  background: none; border: 1px solid var(--line); border-radius: 7px; padding: 2px 9px; }
.card h2 button:hover { color: var(--ink); border-color: var(--soft); }
svg.chart { display: block; width: 100%; overflow: visible; touch-action: pan-y; }
svg.chart text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--paper); border-radius: 8px; padding: 5px 10px;
  font-size: 12.5px; line-height: 1.45; white-space: pre; font-variant-numeric: tabular-nums; opacity: 0; transition: opacity .12s; z-index: 9; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.samples td { padding: 7px 10px 7px 0; border-top: 1px solid var(--grid); vertical-align: top;
  font: 13.5px/1.5 ui-monospace, "SF Mono", "JetBrains Mono", "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.samples tr:first-child td { border-top: 0; }
.samples td.q { color: var(--soft); text-align: right; white-space: pre-wrap; }
.samples td.a { white-space: pre-wrap; }
.samples td.q { width: 47%; }
.samples td.m { width: 26px; text-align: right; padding-right: 0; }
.samples.text td.q { text-align: left; width: 44%; }
.spent td { padding: 4px 14px 4px 0; white-space: nowrap; font-size: 13px; color: var(--soft); }
.spent td:nth-child(2) { width: 62%; }
.bar { display: flex; height: 13px; border-radius: 4px; overflow: hidden; }
.yes { color: var(--good); } .no { color: var(--bad); }
.facts { display: grid; grid-template-columns: 1fr 1fr; column-gap: 28px; }
.facts div { display: flex; justify-content: space-between; gap: 14px; padding: 5px 0; border-top: 1px solid var(--grid); }
.facts div:nth-child(-n+2) { border-top: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.facts { font-size: 13.5px; margin: 0; }
footer { margin-top: 24px; color: var(--soft); font-size: 12.5px; display: flex; flex-wrap: wrap; gap: 4px 22px; }
footer code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
@media (max-width: 860px) {
  .half, .third { grid-column: 1 / -1; } .tiles { grid-template-columns: 1fr 1fr; }
  .tile { border-left: 0; border-top: 1px solid var(--line); } .tile:nth-child(-n+2) { border-top: 0; }
  main { padding: 26px 14px 40px; }
}
</style>
</head>
<body>
<main>
  <header>
    <svg width="34" height="44" viewBox="0 0 34 44" fill="none" aria-hidden="true">
      <path d="M17 1v17" stroke="var(--soft)" stroke-width="1.6"/>
      <path d="M9 18h16l-2.2 12L17 43l-5.8-13z" fill="var(--accent)"/><path d="M17 18h8l-2.2 12L17 43z" fill="var(--ink)" opacity=".16"/>
    </svg>
    <div><h1 id="title"></h1><p id="sub"></p></div>
  </header>
  <section class="tiles" id="tiles"></section>
  <section class="grid" id="grid"></section>
  <footer id="foot"></footer>
</main>
<div class="tip" id="tip"></div>
<noscript>This page draws its charts with the script it carries; please allow it.</noscript>
<script>
"use strict";
const run = @DATA@;
)html"
                              R"html(
const s = run.summary, c = run.columns, set = s.settings, $ = id => document.getElementById(id);
const el = (tag, props = {}, ...kids) => { const e = Object.assign(document.createElement(tag), props); e.append(...kids); return e; };
const svg = (tag, attrs = {}) => { const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const k in attrs) e.setAttribute(k, attrs[k]); return e; };
const count = n => Math.round(n).toLocaleString("en-US");
const short = n => n >= 1e9 ? +(n / 1e9).toPrecision(3) + " B" : n >= 1e6 ? +(n / 1e6).toPrecision(3) + " M" : n >= 1e4 ? +(n / 1e3).toPrecision(3) + " k" : count(n);
const num = v => v === null || v === undefined ? "–" : v === 0 ? "0" : Math.abs(v) >= 1000 ? count(v) : Math.abs(v) < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(3));
const bytes = b => b >= 1e9 ? (b / 1e9).toFixed(2) + " GB" : Math.round(b / 1e6) + " MB";
const time = t => t < 60 ? t.toFixed(1) + " s" : t < 3600 ? Math.floor(t / 60) + " min " + Math.round(t % 60) + " s" : Math.floor(t / 3600) + " h " + Math.round(t % 3600 / 60) + " min";
const plural = (n, word) => count(n) + " " + word + (n === 1 ? "" : "s");

$("title").textContent = s.task[0].toUpperCase() + s.task.slice(1) + (s.stopped ? " (stopped early)" : "");
document.title = s.task + " · Plumb run";
$("sub").textContent = `GPT with ${short(s.params)} parameters · ${plural(s.steps, "step")} in ${time(s.seconds)} · ` +
  `${plural(s.ranks, "rank")}${s.ranks > 1 ? `, ${s.strategy} over ${s.backend}` : ""} · ${s.dtype} on ${s.device}`;
const tile = (name, value, unit, note) => $("tiles").append(el("div", {className: "tile"}, el("span", {textContent: name}),
  el("b", {}, value, el("small", {textContent: unit})), el("i", {textContent: note})));
tile("Accuracy", s.accuracy === null ? "–" : (100 * s.accuracy).toFixed(1), "%", `of ${count(s.asked)} ${s.held_out}`);
tile("Loss", num(s.loss), "", `from ${num(s.first_loss)}`);
tile("Step", num(s.step_ms_median), "ms", "median");
tile("Speed", short(s.tokens_per_s), "tokens/s", "all ranks together");
tile("Memory", bytes(Math.max(...s.peak_rss_bytes)).split(" ")[0], bytes(Math.max(...s.peak_rss_bytes)).split(" ")[1], "peak of one rank");

function card(title, note, size) {
  const head = el("h2", {}, title, el("em", {textContent: note || ""}));
  const box = el("section", {className: "card " + size}, head);
  $("grid").append(box);
  return {box, head};
}

function ticks(lo, hi, want) {
  const raw = (hi - lo) / want, mag = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 2.5, 5, 10].find(k => k * mag >= raw) * mag;
  const out = []; for (let v = Math.ceil(lo / step) * step; v <= hi + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}
function logTicks(lo, hi) {
  let out = []; for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++) for (const k of [1, 2, 5]) out.push(k * 10 ** e);
  out = out.filter(v => v >= lo && v <= hi);
  return out.length > 6 ? out.filter(v => Math.abs(Math.log10(v) % 1) < 1e-9) : out;
}
const quantile = (v, q) => { const w = v.slice().sort((a, b) => a - b); return w[Math.min(w.length - 1, Math.floor(q * w.length))]; };

// lines: [{name, x, y, color, fill, dots, smooth}]
function chart(box, lines, o) {
  const old = box.querySelector("svg.chart"); if (old) old.remove();
  const W = Math.max(220, box.clientWidth - 36), H = o.height || 190, L = o.left || 52, R = 10, T = 8, B = 24;
  const g = svg("svg", {class: "chart", viewBox: `0 0 ${W} ${H}`, height: H, role: "img", "aria-label": o.label});
  const xs = c.step, ys = lines.flatMap(l => l.y).filter(v => v !== null && (!o.log || v > 0));
  if (!ys.length) { box.append(el("p", {textContent: "no values"})); return; }
  let x0 = Math.min(xs[0], 1), x1 = Math.max(xs[xs.length - 1], x0 + 1);
  let lo = o.min !== undefined ? o.min : Math.min(...ys), hi = o.max !== undefined ? o.max : Math.max(...ys);
  if (o.robust && ys.length > 20) hi = Math.min(hi, quantile(ys, .99) * 1.25);
  if (o.log) { lo *= .85; hi *= 1.15; } else if (o.max === undefined) hi += (hi - lo || Math.abs(hi) || 1) * .06;
  if (!o.log && o.min === undefined) lo = Math.max(lo >= 0 ? 0 : -Infinity, lo - (hi - lo) * .06);
  const f = o.log ? Math.log : v => v, X = v => L + (v - x0) / (x1 - x0) * (W - L - R);
  const Y = v => T + (1 - (f(Math.max(v, o.log ? lo : -Infinity)) - f(lo)) / (f(hi) - f(lo))) * (H - T - B);
  for (const v of o.log ? logTicks(lo, hi) : ticks(lo, hi, H > 220 ? 5 : 4)) {
    g.append(svg("line", {x1: L, x2: W - R, y1: Y(v), y2: Y(v), stroke: "var(--grid)"}));
    const t = svg("text", {x: L - 9, y: Y(v) + 4, "text-anchor": "end"}); t.textContent = (o.axis || num)(v); g.append(t);
  }
  for (const v of ticks(x0, x1, W > 700 ? 9 : W > 400 ? 5 : 3)) {
    if (v < x0 || v % 1 || X(v) < L + 40) continue;
    const t = svg("text", {x: X(v), y: H - 5, "text-anchor": X(v) > W - 30 ? "end" : "middle"}); t.textContent = count(v); g.append(t);
  }
  const name = svg("text", {x: L, y: H - 5}); name.textContent = "step"; g.append(name);
  const id = "clip" + Math.random().toString(36).slice(2);
  const clip = svg("clipPath", {id}); clip.append(svg("rect", {x: L - 4, y: 0, width: W - L - R + 8, height: H - B + 3})); g.append(clip);
  const ink = svg("g", {"clip-path": `url(#${id})`}); g.append(ink);
  for (const l of lines) {
    let d = "", pen = "M"; l.x.forEach((x, i) => { const y = l.y[i]; if (y === null || (o.log && y <= 0)) { pen = "M"; return; } d += pen + X(x).toFixed(1) + " " + Y(y).toFixed(1); pen = "L"; });
    if (l.fill) ink.append(svg("path", {d: d + `L${X(l.x[l.x.length - 1])} ${H - B}L${X(l.x[0])} ${H - B}Z`, fill: "var(--fill)"}));
    ink.append(svg("path", {d, fill: "none", stroke: l.color, "stroke-width": l.thin ? 1 : l.width || 1.9, opacity: l.thin ? .38 : 1, "stroke-linejoin": "round", "stroke-linecap": "round"}));
    if (l.dots) l.x.forEach((x, i) => g.append(svg("circle", {cx: X(x), cy: Y(l.y[i]), r: 3.6, fill: "var(--card)", stroke: l.color, "stroke-width": 2})));
  }
  const cross = svg("line", {y1: T, y2: H - B, stroke: "var(--soft)", "stroke-dasharray": "2 3", opacity: 0}); g.append(cross);
  const marks = lines.map(l => { const m = svg("circle", {r: 4, fill: l.color, stroke: "var(--card)", "stroke-width": 2, opacity: 0}); g.append(m); return m; });
  g.addEventListener("pointermove", e => {
    const r = g.getBoundingClientRect(), at = x0 + ((e.clientX - r.left) / r.width * W - L) / (W - L - R) * (x1 - x0);
    const near = l => l.x.reduce((b, x, i) => Math.abs(x - at) < Math.abs(l.x[b] - at) ? i : b, 0);
    const first = near(lines[0]), x = lines[0].x[first];
    cross.setAttribute("x1", X(x)); cross.setAttribute("x2", X(x)); cross.setAttribute("opacity", 1);
    let text = "step " + count(x);
    lines.forEach((l, k) => { const i = near(l); if (l.y[i] === null) return; text += `\n${l.name}  ${(o.value || num)(l.y[i])}`;
      marks[k].setAttribute("cx", X(l.x[i])); marks[k].setAttribute("cy", Math.max(T, Y(l.y[i]))); marks[k].setAttribute("opacity", l.thin ? 0 : 1); });
    const tip = $("tip"); tip.textContent = text; tip.style.opacity = 1;
    const w = tip.offsetWidth; tip.style.left = (e.clientX + 16 + w > innerWidth ? e.clientX - w - 14 : e.clientX + 16) + "px"; tip.style.top = e.clientY - 14 + "px";
  });
  g.addEventListener("pointerleave", () => { cross.setAttribute("opacity", 0); marks.forEach(m => m.setAttribute("opacity", 0)); $("tip").style.opacity = 0; });
  box.append(g);
}
)html"
                              R"html(
// Exponential moving averages from both ends, so that the line lags behind neither.
const smooth = (y, k) => { const a = average(y, k), b = average(y.slice().reverse(), k).reverse(); return y.map((v, i) => v === null ? null : (a[i] + b[i]) / 2); };
const average = (y, k) => { let m = 0, w = 0; return y.map(v => { if (v === null) return null; m = k * m + (1 - k) * v; w = k * w + 1 - k; return m / w; }); };
const keep = y => Math.max(0, Math.min(.9, 1 - 12 / y.length));
const draws = [], measured = c.accuracy.length > 1;
const later = f => { draws.push(f); f(); };

const binned = c.bin > 1 ? `each point is the mean of ${c.bin} steps` : "";
{
  const {box, head} = card("Loss", binned || "mean over the global batch", "wide");
  const y = c.loss.filter(v => v > 0); let log = y.length > 1 && Math.max(...y) / Math.min(...y) > 30;
  const button = el("button", {title: "switch between a linear and a logarithmic scale"}); head.append(button);
  const draw = () => { button.textContent = log ? "logarithmic" : "linear";
    chart(box, [{name: "loss", x: c.step, y: c.loss, color: "var(--accent)", thin: c.step.length > 60, fill: !log},
      ...(c.step.length > 60 ? [{name: "smoothed", x: c.step, y: log ? smooth(c.loss.map(v => v > 0 ? Math.log(v) : null), keep(c.loss)).map(v => v === null ? null : Math.exp(v)) : smooth(c.loss, keep(c.loss)), color: "var(--accent)"}] : [])],
      {height: 290, log, label: "loss by step", min: log ? undefined : 0, value: v => v === null ? "–" : v < 1e-3 ? v.toExponential(2) : v.toFixed(4)}); };
  button.onclick = () => { log = !log; draw(); };
  later(draw);
}
if (measured) {
  const {box} = card("Accuracy", `on ${s.held_out}, never trained on`, "half");
  later(() => chart(box, [{name: "accuracy", x: c.accuracy.map(p => p[0]), y: c.accuracy.map(p => p[1]), color: "var(--good)", dots: true}],
    {min: 0, max: 1.02, label: "accuracy by step", axis: v => Math.round(100 * v) + " %", value: v => (100 * v).toFixed(1) + " %"}));
}
{
  const {box} = card("Step time", `${num(s.step_ms_median)} ms median`, measured ? "half" : "wide");
  later(() => chart(box, [{name: "ms", x: c.step, y: c.ms, color: "var(--accent2)", thin: c.step.length > 60},
    ...(c.step.length > 60 ? [{name: "smoothed", x: c.step, y: smooth(c.ms, keep(c.ms)), color: "var(--accent2)"}] : [])],
    {min: 0, robust: true, label: "step time", axis: v => num(v) + " ms", value: v => v.toFixed(1) + " ms"}));
}
{
  const {box} = card("Gradient norm", set.clip > 0 ? `before clipping at ${num(set.clip)}` : "never clipped", "third");
  later(() => chart(box, [{name: "norm", x: c.step, y: c.norm, color: "var(--c3)", thin: c.step.length > 60},
    ...(c.step.length > 60 ? [{name: "smoothed", x: c.step, y: smooth(c.norm, keep(c.norm)), color: "var(--c3)"}] : [])],
    {min: 0, robust: true, label: "gradient norm"}));
}
if (s.time_spent_ms && s.time_spent_ms.length) {
  const kinds = [["compute", "compute", "c0"], ["data", "gradients and updated parameters", "c1"], ["gathers", "gathers", "c3"],
    ["control", "host messages", "c6"], ["optimizer", "optimizer", "c2"]];
  const {box, head} = card("Where a step's time goes", "mean of the traced steps, in ms; waits are what no computation hides", "wide");
  head.append(el("span", {className: "keys"}, ...kinds.map(([, name, color]) => { const k = el("s"); k.style.background = `var(--${color})`; return el("span", {}, k, name); })));
  const longest = Math.max(...s.time_spent_ms.map(t => t.step)) || 1, table = el("table", {className: "spent"});
  s.time_spent_ms.forEach((t, r) => {
    const bar = el("div", {className: "bar"}), row = table.insertRow();
    for (const [key, name, color] of kinds) {
      const part = el("span", {title: `${name}: ${num(t[key])} ms`}); part.style.width = 100 * Math.max(0, t[key]) / longest + "%";
      part.style.background = `var(--${color})`; bar.append(part);
    }
    const who = t.waited_for.map((ms, q) => [ms, q]).filter(w => w[0] > .005 * t.step).sort((a, b) => b[0] - a[0]).slice(0, 3);
    row.append(el("td", {textContent: "rank " + r}), el("td", {}, bar), el("td", {textContent: num(t.step) + " ms"}),
      el("td", {textContent: who.length ? "waited for " + who.map(([ms, q]) => `rank ${q} (${num(ms)} ms)`).join(", ") : ""}));
  });
  box.append(table);
}
{
  const {box, head} = card("Memory", c.memory.length > 1 ? "" : "resident", "third");
  const shown = c.memory.slice(0, 8);
  if (shown.length > 1) head.append(el("span", {className: "keys"}, ...shown.map((_, r) => { const k = el("s"); k.style.background = `var(--c${r})`; return el("span", {}, k, "rank " + r); })));
  later(() => chart(box, shown.map((m, r) => ({name: "rank " + r, x: c.step, y: m, color: `var(--c${r})`, width: 1.3})),
    {min: 0, label: "memory by step", axis: bytes, value: bytes}));
}
{
  const {box} = card("Learning rate", "", "third");
  later(() => chart(box, [{name: "lr", x: c.step, y: c.lr, color: "var(--c4)"}], {min: 0, label: "learning rate by step"}));
}
const sums = s.task.startsWith("addition");
if (s.samples.length) {
  const {box} = card("Samples", sums ? "held-out sums, greedy decoding" : "held-out text, continued by greedy decoding", sums ? "half" : "wide");
  const table = el("table", {className: "samples" + (sums ? "" : " text")});
  for (const p of s.samples) {
    const row = table.insertRow();
    row.append(el("td", {className: "q", textContent: p.prompt}), el("td", {className: "a", textContent: p.output + (sums && !p.right ? "  (" + p.expected + ")" : "")}));
    if (sums) row.append(el("td", {className: "m " + (p.right ? "yes" : "no"), textContent: p.right ? "✓" : "✗", title: p.right ? "right" : "wrong"}));
  }
  box.append(table);
}
{
  const {box} = card("Settings", "", sums && s.samples.length ? "half" : "wide");
  const list = el("dl", {className: "facts"});
  const hidden = ["json", "quiet", "out", "ranks", "strategy", "backend", "device", "eval-every", "model"];
  if (sums) hidden.push("data"); else hidden.push("digits");
  for (const k in set) if (!hidden.includes(k)) list.append(el("div", {}, el("dt", {textContent: k}), el("dd", {textContent: k === "threads" && !set[k] ? "auto" : String(set[k])})));
  box.append(list);
}
$("foot").append(el("span", {}, "model digest ", el("code", {textContent: s.model_digest})), el("span", {textContent: "every number of this page is in log.jsonl"}));
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draws.forEach(f => f()); } });
</script>
</body>
</html>
)html";

}  // namespace plumb::report
