// The head of the page, the choice of section and theme, and drawing everything.
function figure(label, value, more, part) {
  const [number, unit] = value.split(/ (?=[^ ]+$)/);
  const meter = part === undefined ? null : element("div", { class: "meter" }, element("i", { class: grade(part), style: `width:${Math.min(100, 100 * part)}%` }));
  return element("div", { class: "figure" }, element("div", { class: "label" }, label), element("div", { class: "value" }, number, element("small", {}, unit ? ` ${unit}` : "")), meter, element("div", { class: "more" }, more));
}

function drawFigures() {
  const s = current(), seconds = s.total || 1, npu = s.rows.filter((r) => r.device === "npu");
  const sum = (key) => npu.reduce((total, r) => total + r[key], 0);
  const roof = sum("roof"), lost = s.rows.reduce((total, r) => total + r.lost, 0), flops = sum("flops"), moved = sum("read") + sum("written");
  const many = s.count > 1 ? ` · ${s.count} such runs` : "";
  const made = [figure("Run", time(s.whole), `${time(s.seconds)} with every step timed, ${s.runs} runs${many}`)];
  if (s.before) made.push(figure("Compared", signed(s.total / s.before - 1).replace("%", " %"), `${time(s.total)} in all steps, ${time(s.before)} before`));
  if (roof) made.push(figure("Of the roofline", percent(roof / seconds).replace("%", " %"), `the device needs at least ${time(roof)}`, roof / seconds));
  if (data.limits) made.push(figure("Lost", time(lost), `of ${time(s.total)} in ${s.rows.length} steps`));
  const dtypes = [...new Set(npu.filter((r) => r.flops).map((r) => r.dtype))], peak = data.limits ? Math.max(0, ...dtypes.map((d) => data.limits.flops[d] || 0)) : 0;
  made.push(figure("Arithmetic", scaled(flops / seconds, "FLOP/s"), peak ? `${percent(flops / seconds / peak)} of the peak ${scaled(peak, "FLOP/s")}` : `${scaled(flops, "FLOP")} in a run`));
  made.push(figure("Traffic", scaled(moved / seconds, "B/s"), data.limits ? `${percent(moved / seconds / data.limits.memory)} of memory's ${scaled(data.limits.memory, "B/s")}` : `${bytes(moved)} in a run`));
  const weights = data.held.filter((h) => h.kind !== "state").reduce((total, h) => total + h.nbytes, 0), states = data.held.filter((h) => h.kind === "state").reduce((total, h) => total + h.nbytes, 0);
  const arena = s.arenas.reduce((total, a) => total + a.nbytes, 0);
  made.push(figure("Memory", bytes(arena + weights + states), `arena ${bytes(arena)}, weights ${bytes(weights)}${states ? `, state ${bytes(states)}` : ""}`));
  $("figures").replaceChildren(...made);
}

function drawKinds() {
  const s = current();
  $("kinds-panel").hidden = !s.rows.length;
  const count = (name) => s.rows.filter((r) => r.group === name).length;
  const bar = element("div", { class: "stack" }, ...s.groups.map(([name, seconds]) => {
    const show = (e) => showTip(e.clientX, e.clientY, name, [["time", `${time(seconds)} (${percent(seconds / s.total)})`], ["kernels", count(name)]]);
    return element("i", { style: `flex:${seconds / s.total} 1 0;background:${colours.get(name)}`, onpointermove: show, onpointerleave: hideTip });
  }));
  const legend = element("div", { class: "legend" }, ...s.groups.slice(0, 12).map(([name, seconds]) =>
    element("span", {}, dot(name), name, element("span", { class: "muted" }, `${percent(seconds / s.total)} · ${time(seconds)} · ×${count(name)}`))));
  $("kinds").replaceChildren(bar, legend);
}

function drawHost() {
  $("host-panel").hidden = !data.not_on_npu.length;
  $("host").tHead.replaceChildren(element("tr", {}, ...["node", "op", "why", "what to do", "module", "source"].map((t) => element("th", { scope: "col" }, t))));
  $("host").tBodies[0].replaceChildren(...data.not_on_npu.map((n) => element("tr", {}, element("td", { class: "mono" }, n.node), element("td", { class: "mono" }, n.op),
    element("td", { style: "white-space:normal;min-width:220px" }, n.reason), element("td", { style: "white-space:normal;min-width:160px" }, n.fix || "–"),
    element("td", {}, [...new Set(n.places.map((p) => p.module || p.kind))].join(", ")), element("td", { class: "mono" }, n.places.map((p) => p.source).join(", ")))));
}

function drawAll() {
  for (const draw of [drawFigures, drawKinds, drawTimeline, drawRoofline, drawModules, drawAccuracy, drawTable, drawMemory, drawHost]) draw();
}

function drawHead() {
  $("model").textContent = data.model;
  $("device").textContent = [data.machine, data.device, data.dtype, `npusim ${data.version}`, data.created].filter(Boolean).join(" · ");
  const tabs = prepared.map((s, n) => element("button", { type: "button", role: "tab", "aria-selected": String(n === state.section), tabindex: n === state.section ? 0 : -1,
    onclick: () => { Object.assign(state, { section: n, chosen: -1, zoom: 1 }); state.kinds.clear(); drawHead(); drawAll(); },
    onkeydown: (e) => { const to = { ArrowRight: n + 1, ArrowLeft: n - 1 }[e.key]; const tab = $("sections").children[to]; if (tab) { tab.click(); $("sections").children[to].focus(); } },
  }, `${s.title} `, element("span", { class: "muted" }, time(s.whole))));
  $("sections").replaceChildren(...(tabs.length > 1 ? tabs : []));
  $("notes").replaceChildren(...data.notes.map((note) => element("p", {}, note)), element("p", {}, "Lost time is the time beyond what the roofline allows. GFLOP/s count the operations of the direct algorithm. Times are medians."));
}

const themes = ["auto", "light", "dark"];
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").querySelector("span").textContent = name;
}
$("theme").addEventListener("click", () => setTheme(themes[(themes.indexOf($("theme").querySelector("span").textContent) + 1) % 3]));
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { drawTimeline(); drawRoofline(); drawMemory(); drawAccuracy(); }); });
addEventListener("keydown", (e) => {
  if (e.key === "/" && document.activeElement.tagName !== "INPUT") { e.preventDefault(); $("filter").focus(); }
  if (e.key === "Escape") hideTip();
});
drawHead();
drawAll();
document.documentElement.dataset.ready = "true";
