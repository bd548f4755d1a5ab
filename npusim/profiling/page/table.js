// The table of kernels: sorted by its headers, filtered by text and kind; a row opens its details.
const COLUMNS = [
  { key: "index", title: "#", cell: (r) => r.index, number: true },
  { key: "name", title: "kernel", cell: (r) => element("span", { class: "cut short mono", title: r.name }, r.name) },
  { key: "group", title: "kind", cell: (r) => element("span", { class: "kind" }, dot(r.group), element("span", { class: "cut short", title: r.kind }, r.kind)) },
  { key: "module", title: "module", cell: (r) => element("span", { class: "cut", title: r.module }, r.module || "–") },
  { key: "dtype", title: "dtype", cell: (r) => r.dtype },
  { key: "shape", title: "result", cell: (r) => element("span", { class: "cut short mono", title: r.outputs.join(", ") }, shape(r)), value: (r) => shape(r) },
  { key: "seconds", title: "time", cell: (r) => time(r.seconds), number: true, down: true },
  { key: "share", title: "share", cell: (r) => withBar(percent(r.share), r.share / (current().most || 1), ""), number: true, down: true },
  { key: "gflops", title: "GFLOP/s", cell: (r) => (r.flops ? r.gflops.toFixed(1) : "–"), number: true, down: true },
  { key: "gbytes", title: "GB/s", cell: (r) => (r.read + r.written ? r.gbytes.toFixed(1) : "–"), number: true, down: true },
  { key: "ofRoof", title: "of roofline", cell: (r) => (r.roof ? withBar(percent(r.ofRoof), r.ofRoof, grade(r.ofRoof)) : "–"), number: true },
  { key: "lost", title: "lost", cell: (r) => (r.lost ? time(r.lost) : "–"), number: true, down: true },
  { key: "change", title: "change", cell: (r) => (Number.isFinite(r.change) ? element("span", { class: Math.abs(r.change) < 0.05 ? "muted" : r.change > 0 ? "poor" : "good", title: `${time(r.before)} before` }, signed(r.change)) : "new"), number: true, down: true, only: (rows) => rows.some((r) => r.before) },
  { key: "rms", title: "error", cell: (r) => (Number.isFinite(r.rms) ? r.rms.toExponential(1) : "–"), number: true, down: true, only: (rows) => rows.some((r) => r.error) },
];
const shape = (r) => (r.outputs[0] || "").replace(/^\w+(\[[^\]]*\]).*/, "$1");
function withBar(text, part, kind) {
  return element("span", {}, text, element("span", { class: "bar" }, element("i", { class: kind, style: `width:${Math.min(100, 100 * part)}%` })));
}

function visibleRows() {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = current().rows.filter((r) => (!state.kinds.size || state.kinds.has(r.group)) && words.every((w) => r.words.includes(w)));
  const column = COLUMNS.find((c) => c.key === state.sort), value = column.value || ((r) => r[state.sort]);
  const order = (a, b) => (Number.isNaN(a) ? 1 : Number.isNaN(b) ? -1 : typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return rows.sort((a, b) => (state.down ? -1 : 1) * order(value(a), value(b)) || a.index - b.index);
}

function drawTable() {
  const section = current(), columns = COLUMNS.filter((c) => !c.only || c.only(section.rows));
  section.most = Math.max(...section.rows.map((r) => r.share), 0);
  const head = columns.map((c) => element("th", { scope: "col", class: c.number ? "n" : null, "aria-sort": c.key === state.sort ? (state.down ? "descending" : "ascending") : null },
    element("button", { type: "button", onclick: () => sortBy(c) }, c.title)));
  $("kernels").tHead.replaceChildren(element("tr", {}, ...head));
  const rows = visibleRows(), body = $("kernels").tBodies[0];
  body.replaceChildren(...rows.flatMap((r) => tableRow(r, columns)));
  if (!rows.length) body.append(element("tr", {}, element("td", { colspan: columns.length, class: "empty" }, section.rows.length ? "No kernel fits the filter." : "This program has no kernels.")));
  const all = section.rows.length, sum = rows.reduce((s, r) => s + r.seconds, 0);
  $("count").textContent = rows.length === all ? `${all}` : `${rows.length} of ${all}, ${time(sum)}`;
  $("chips").replaceChildren(...(section.groups.length > 1 ? section.groups.map(([name]) => chip(name)) : []));
}

function chip(name) {
  const toggle = () => { state.kinds.has(name) ? state.kinds.delete(name) : state.kinds.add(name); drawTable(); };
  const count = current().rows.filter((r) => r.group === name).length;
  return element("button", { type: "button", "aria-pressed": String(state.kinds.has(name)), onclick: toggle }, dot(name), `${name} ${count}`);
}

function sortBy(column) {
  state.down = state.sort === column.key ? !state.down : Boolean(column.down);
  state.sort = column.key;
  drawTable();
  $("kernels").querySelector("th[aria-sort] button").focus();
}

function tableRow(r, columns) {
  const open = isChosen(r);
  const toggle = () => choose(open ? -1 : r.index, "table");
  const key = (e) => {
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); toggle(); }
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[e.key];
    let row = e.currentTarget;
    do row = next && row[next]; while (row && !row.classList.contains("row"));
    if (row) { e.preventDefault(); row.focus(); }
  };
  const made = element("tr", { class: open ? "row open" : "row", tabindex: 0, "data-index": r.index, "aria-expanded": String(open), onclick: toggle, onkeydown: key },
    ...columns.map((c) => element("td", { class: c.number ? "n" : null }, c.cell(r))));
  return open ? [made, element("tr", { class: "detail" }, element("td", { colspan: columns.length }, details(r)))] : [made];
}

function details(r) {
  const list = (items) => (items.length ? element("ul", { class: "mono" }, ...items.map((i) => element("li", {}, i))) : "");
  const places = r.places.map((p) => `${p.module || "(model)"}  ${p.kind}  ${p.source}`);
  const cost = [r.flops ? scaled(r.flops, "FLOP") : "", r.read ? `reads ${bytes(r.read)}` : "", r.written ? `writes ${bytes(r.written)}` : ""].filter(Boolean).join(", ");
  const facts = [
    ["time", `median ${time(r.seconds)}, least ${time(r.least)}, at least ${r.roof ? `${time(r.roof)} on this device, bound by ${r.bound}` : "unknown"}`],
    ["work", cost], ["computes", r.text ? element("span", { class: "mono" }, r.text) : ""], ["comes from", list(places)], ["IR nodes", r.ops.join(", ")],
    ["inputs", list(r.inputs)], ["outputs", list(r.outputs)], ["launch", r.launch],
    ["error", r.error ? (r.error.note ? `not measured: ${r.error.note}` : `RMS ${r.rms.toExponential(2)}, largest ${Number(r.error.largest).toExponential(2)}`) : ""],
    ["reads from", r.after.map((n) => current().rows[n].name).join(", ")],
  ];
  return element("dl", {}, ...facts.filter(([, value]) => value !== "").flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

$("filter").addEventListener("input", (e) => { state.filter = e.target.value; drawTable(); });
onChoose.push((origin) => {
  if (origin === "keys") return;
  if (origin !== "table" && state.chosen >= 0) { state.filter = ""; state.kinds.clear(); $("filter").value = ""; }
  drawTable();
  const row = $("kernels").querySelector(`tr[data-index="${state.chosen}"]`);
  if (row && origin === "table") row.focus({ preventScroll: true });
  else if (row) { row.scrollIntoView({ block: "center" }); row.focus({ preventScroll: true }); }
});
