// What all views share: the data, formats, colours, the tooltip, and which row is chosen.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { section: 0, chosen: -1, sort: "lost", down: true, kinds: new Set(), filter: "", zoom: 1, depth: 0, merge: null };

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "path", "circle", "text"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

const digits = (value, unit) => `${value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2)} ${unit}`;
function time(seconds) {
  const us = seconds * 1e6;
  return us < 1000 ? digits(us, "µs") : us < 1e6 ? digits(us / 1e3, "ms") : digits(us / 1e6, "s");
}
function scaled(value, unit) {
  for (const prefix of ["", "k", "M", "G", "T", "P"]) {
    if (Math.abs(value) < 999.5 || prefix === "P") return value < 1000 && prefix === "" && Number.isInteger(value) ? `${value} ${unit}` : digits(value, prefix + unit);
    value /= 1000;
  }
}
const bytes = (value) => scaled(value, "B");
const percent = (part) => (part > 0 && part < 0.001 ? "<0.1%" : `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)}%`);
const signed = (part) => `${part >= 0 ? "+" : "−"}${(100 * Math.abs(part)).toFixed(Math.abs(part) < 0.0995 ? 1 : 0)}%`;
const grade = (part) => (part >= 0.6 ? "good" : part >= 0.3 ? "fair" : "poor");

// Modules in words; those with one parent share its name: layer1.0: conv1, bn1, relu.
function moduleText(places) {
  const names = [...new Set(places.map((p) => p.module || p.kind))];
  const paths = names.map((name) => name.split("."));
  let shared = 0;
  while (names.length > 1 && paths.every((path) => path[shared] !== undefined && path[shared] === paths[0][shared])) shared += 1;
  const rest = paths.map((path) => path.slice(shared).join(".")).filter(Boolean);
  return shared && rest.length ? `${paths[0].slice(0, shared).join(".")}: ${rest.join(", ")}` : names.join(", ");
}

// The rows of a section with what follows from their figures.
const prepared = data.sections.map((section) => {
  const total = section.rows.reduce((sum, r) => sum + r.seconds, 0);
  const rows = section.rows.map((r) => ({
    ...r, lost: r.device !== "npu" ? r.seconds : r.roof ? Math.max(0, r.seconds - r.roof) : 0,
    share: total ? r.seconds / total : 0, ofRoof: r.roof && r.seconds ? r.roof / r.seconds : 0,
    gflops: r.seconds ? r.flops / r.seconds / 1e9 : 0, gbytes: r.seconds ? (r.read + r.written) / r.seconds / 1e9 : 0,
    group: r.device === "npu" ? r.kind : r.device, module: moduleText(r.places),
    source: [...new Set(r.places.map((p) => p.source).filter(Boolean))].join(", "),
    change: r.before ? r.seconds / r.before - 1 : NaN,
    rms: r.error && r.error.rms !== null ? r.error.rms : NaN,
  }));
  for (const r of rows) r.words = [r.name, r.kind, ...r.places.map((p) => p.module), r.source, r.dtype, ...r.ops, ...r.inputs, ...r.outputs].join(" ").toLowerCase();
  const byGroup = new Map();
  for (const r of rows) byGroup.set(r.group, (byGroup.get(r.group) || 0) + r.seconds);
  return { ...section, rows, total, groups: [...byGroup].sort((a, b) => b[1] - a[1]) };
});
const current = () => prepared[state.section];

// A kind has one colour in all sections.
const colours = new Map([["host", "var(--host)"], ["transfer", "var(--transfer)"]]);
{
  const sums = new Map();
  for (const s of prepared) for (const [name, seconds] of s.groups) sums.set(name, (sums.get(name) || 0) + seconds / (s.total || 1));
  const ranked = [...sums].sort((a, b) => b[1] - a[1]).map(([name]) => name).filter((name) => !colours.has(name));
  ranked.forEach((name, i) => colours.set(name, i < 8 ? `var(--c${i})` : "var(--other)"));
}
const colour = (row) => colours.get(row.group);
const dot = (name) => element("i", { class: "dot", style: `background:${colours.get(name)}` });

const tip = $("tip");
function showTip(x, y, title, pairs) {
  const rows = pairs.filter(([, value]) => value !== "" && value !== null).map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, String(value))));
  tip.replaceChildren(element("b", {}, title), element("table", {}, ...rows));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
const rowFacts = (r) => [
  ["module", r.module.length > 160 ? `${r.module.slice(0, 160)} …` : r.module], ["source", r.source.length > 120 ? `${r.source.slice(0, 120)} …` : r.source],
  ["time", `${time(r.seconds)} (${percent(r.share)})`], ["lost", r.lost ? time(r.lost) : ""],
  ["before", r.before ? `${time(r.before)}, now ${signed(r.change)}` : ""],
  ["roofline", r.roof ? `${percent(r.ofRoof)}, bound by ${r.bound}` : ""],
  ["rate", [r.flops ? scaled(r.flops / (r.seconds || 1), "FLOP/s") : "", r.read + r.written ? scaled((r.read + r.written) / (r.seconds || 1), "B/s") : ""].filter(Boolean).join(", ")],
];
const tipFor = (row) => ({
  onpointermove: (e) => showTip(e.clientX, e.clientY, `${row.name} · ${row.kind}`, rowFacts(row)), onpointerleave: hideTip,
});

// Choosing a row marks it in every view.
const onChoose = [];
function choose(index, origin) {
  state.chosen = index;
  for (const view of onChoose) view(origin);
}
const isChosen = (row) => row.index === state.chosen;

function ticks(most, count) {
  if (!(most > 0)) return [0];
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}
const widthOf = (node) => Math.max(240, node.clientWidth || 600);
