// Time by module: the part that the roofline needs, and the part that is lost.
// Numbered parts are one if ``merge`` is set: model.layers.*.mlp.
function moduleSums(depth, merge) {
  const sums = new Map();
  for (const r of current().rows) {
    const path = r.places.length ? r.places[0].module : "";
    const parts = path.split(".").slice(0, depth).map((part) => (merge && /^\d+$/.test(part) ? "*" : part));
    const name = path ? parts.join(".") : r.places.length ? "(model)" : r.device === "transfer" ? "(transfers)" : "(unknown)";
    const sum = sums.get(name) || { name, seconds: 0, lost: 0, count: 0 };
    sum.seconds += r.seconds; sum.lost += Math.min(r.lost, r.seconds); sum.count += 1;
    sums.set(name, sum);
  }
  return [...sums.values()].sort((a, b) => b.seconds - a.seconds);
}

// Unless the reader has chosen: repeated layers are merged, and the depth is the least that tells six modules apart.
function moduleChoice(deepest) {
  const numbers = new Set(current().rows.flatMap((r) => r.places.slice(0, 1).flatMap((p) => p.module.match(/(?<=^|\.)\d+(?=\.|$)/g) || [])));
  const merge = state.merge === null ? numbers.size > 6 : state.merge;
  let depth = 1;
  while (depth < Math.min(5, deepest) && moduleSums(depth, merge).length < 6) depth += 1;
  return { merge, numbered: numbers.size > 0, depth: state.depth ? Math.min(state.depth, deepest) : depth };
}

function drawModules() {
  const section = current(), place = $("modules");
  const deepest = Math.max(1, ...section.rows.map((r) => (r.places[0] ? r.places[0].module.split(".").length : 1)));
  const chosen = moduleChoice(deepest);
  const depths = Array.from({ length: Math.min(5, deepest) }, (_, i) => i + 1).map((n) =>
    element("button", { type: "button", class: "quiet", "aria-pressed": String(n === chosen.depth), "aria-label": `${n} levels`, onclick: () => { state.depth = n; drawModules(); } }, String(n)));
  const merge = element("button", { type: "button", class: "quiet", "aria-pressed": String(chosen.merge), onclick: () => { state.merge = !chosen.merge; drawModules(); } }, "merge layers");
  $("depth").replaceChildren(...(chosen.numbered ? [merge] : []), ...(deepest > 1 ? depths : []));
  const sums = moduleSums(chosen.depth, chosen.merge), most = Math.max(...sums.map((s) => s.seconds), 1e-12), known = Boolean(data.limits);
  if (!section.rows.some((r) => r.places.length)) {
    place.replaceChildren(element("p", { class: "empty" }, "The program does not say which modules its kernels come from."));
    return;
  }
  const shown = sums.slice(0, 14);
  const list = element("div", { class: "list" });
  for (const s of shown) {
    const facts = [["time", `${time(s.seconds)} (${percent(s.seconds / section.total)})`], ["lost", known ? time(s.lost) : ""], ["kernels", s.count]];
    const parts = known ? [s.seconds - s.lost, s.lost] : [s.seconds];
    const show = (e) => showTip(e.clientX, e.clientY, s.name, facts);
    list.append(
      element("span", { class: "name mono", title: s.name }, element("bdi", {}, s.name)),
      element("span", { class: "track", onpointermove: show, onpointerleave: hideTip }, ...parts.map((p) => element("i", { style: `width:${(100 * p) / most}%` }))),
      element("span", { class: "value" }, `${time(s.seconds)} · ${percent(s.seconds / section.total)}`));
  }
  const rest = sums.slice(14).reduce((sum, s) => sum + s.seconds, 0);
  const more = sums.length > 14 ? `${sums.length - 14} more take ${time(rest)}. ` : "";
  const legend = known ? `${more}Pale: what the device needs at least; red: lost.` : more;
  place.replaceChildren(list, element("p", { class: "muted", style: "font-size:12px;margin-top:9px" }, legend));
}
