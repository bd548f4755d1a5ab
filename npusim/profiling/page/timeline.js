// The run as lanes: modules as groups above the kernels, then host ops and transfers.
const LANE = 26, GROUP = 19, LABEL_WIDTH = 6.4;

// Neighbouring kernels of one module, as spans.
function moduleSpans(rows, depth) {
  const spans = [];
  for (const r of rows) {
    const path = (r.places[0] ? r.places[0].module : "").split(".");
    const name = path.length >= depth && path[0] ? path.slice(0, depth).join(".") : "";
    const last = spans[spans.length - 1];
    if (last && last.name === name) { last.end = r.end; last.count += 1; last.seconds += r.seconds; }
    else spans.push({ name, start: r.start, end: r.end, count: 1, seconds: r.seconds });
  }
  return spans.filter((s) => s.name);
}

function drawTimeline() {
  const section = current(), place = $("timeline"), rows = section.rows;
  if (!rows.length) { place.replaceChildren(element("p", { class: "empty" }, "This program has no kernels.")); return; }
  const most = Math.max(...rows.map((r) => r.end)) || 1, left = 62;
  const width = Math.round((widthOf(place) - left - 12) * state.zoom) + left + 12;
  const x = (seconds) => left + (seconds / most) * (width - left - 12);
  const svg = element("svg", { width, role: "img", "aria-label": `${rows.length} steps in ${time(most)}` });
  let y = 20;
  for (const t of ticks(most, Math.min(40, Math.max(3, Math.floor(width / 130))))) {
    svg.append(element("line", { class: "axis", x1: x(t), x2: x(t), y1: 14, y2: 2000 }), element("text", { x: x(t) + 3, y: 10 }, t ? time(t) : "0"));
  }
  const text = (label, at, w, top, kind) => w > label.length * LABEL_WIDTH + 6 ? element("text", { x: at + 4, y: top, class: kind }, label) : w > 34 && label.length > 4 ? element("text", { x: at + 4, y: top, class: kind }, `${label.slice(0, Math.floor((w - 12) / LABEL_WIDTH))}…`) : null;
  for (const depth of [1, 2]) {
    const spans = moduleSpans(rows, depth);
    if (!spans.length || (depth === 2 && spans.every((s) => s.count < 2))) continue;
    if (depth === 1) svg.append(element("text", { x: 2, y: y + 13 }, "modules"));
    for (const s of spans) {
      const w = Math.max(1, x(s.end) - x(s.start));
      const show = (e) => showTip(e.clientX, e.clientY, s.name, [["time", time(s.end - s.start)], ["kernels", s.count]]);
      svg.append(element("rect", { class: "group", x: x(s.start), y, width: w, height: GROUP - 3, rx: 2, onpointermove: show, onpointerleave: hideTip }));
      const label = text(s.name, x(s.start), w, y + 12, "");
      if (label) svg.append(label);
    }
    y += GROUP;
  }
  y += 3;
  for (const lane of ["npu", "host", "transfer"]) {
    const mine = rows.filter((r) => r.device === lane);
    if (!mine.length) continue;
    svg.append(element("text", { x: 2, y: y + 16 }, lane === "npu" ? data.target : lane));
    for (const r of mine) {
      const at = x(r.start), w = Math.max(0.8, x(r.end) - at - 0.4);
      svg.append(element("rect", { class: `mark${isChosen(r) ? " chosen" : ""}`, x: at, y, width: w, height: LANE - 4, rx: Math.min(2, w / 3), fill: colour(r), ...tipFor(r), onclick: () => choose(r.index, "timeline") }));
      const label = text(r.name, at, w, y + 15, "onmark");
      if (label) svg.append(label);
    }
    y += LANE;
  }
  svg.setAttribute("height", y + 2);
  const kept = place.scrollLeft;
  place.replaceChildren(svg);
  place.scrollLeft = kept;
  $("zoom-out").disabled = state.zoom <= 1;
}

function zoomTo(zoom) {
  const place = $("timeline"), middle = (place.scrollLeft + place.clientWidth / 2) / (place.scrollWidth || 1);
  state.zoom = Math.min(400, Math.max(1, zoom));
  drawTimeline();
  place.scrollLeft = middle * place.scrollWidth - place.clientWidth / 2;
}
$("zoom-in").addEventListener("click", () => zoomTo(state.zoom * 2));
$("zoom-out").addEventListener("click", () => zoomTo(state.zoom / 2));
$("zoom-reset").addEventListener("click", () => zoomTo(1));
$("timeline").addEventListener("wheel", (e) => {
  if (!e.ctrlKey && !e.metaKey) return;
  e.preventDefault();
  zoomTo(state.zoom * (e.deltaY < 0 ? 1.3 : 1 / 1.3));
}, { passive: false });
$("timeline").addEventListener("keydown", (e) => {
  const rows = current().rows;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  if (e.key === "+" || e.key === "-") zoomTo(e.key === "+" ? state.zoom * 2 : state.zoom / 2);
  else if (step && rows.length) {
    e.preventDefault();
    choose(Math.min(rows.length - 1, Math.max(0, state.chosen + step)), "keys");
    const mark = $("timeline").querySelector(".chosen"), box = mark.getBoundingClientRect(), outer = $("timeline").getBoundingClientRect();
    if (box.left < outer.left + 60 || box.right > outer.right) $("timeline").scrollLeft += box.left - outer.left - outer.width / 2;
    showTip(Math.max(box.left, outer.left), box.bottom, `${rows[state.chosen].name} · ${rows[state.chosen].kind}`, rowFacts(rows[state.chosen]));
  } else if (e.key === "Enter" && state.chosen >= 0) choose(state.chosen, "timeline");
  else if (e.key === "Escape") hideTip();
});
$("timeline").addEventListener("blur", hideTip);
onChoose.push(drawTimeline);
