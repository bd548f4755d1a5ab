// One bar for each kernel: the logarithm of its error.
function drawAccuracy() {
  const rows = current().rows.filter((r) => r.error);
  $("accuracy-panel").hidden = !rows.length;
  if (!rows.length) return;
  const known = rows.filter((r) => Number.isFinite(r.rms)), place = $("accuracy");
  const width = widthOf(place), height = 120, left = 52, bottom = 8;
  const logs = known.filter((r) => r.rms > 0).map((r) => Math.log10(r.rms));
  const low = Math.floor(Math.min(...logs, -8)) - 0.2, high = Math.ceil(Math.max(...logs, -6));
  const y = (v) => 6 + ((high - v) / (high - low)) * (height - 6 - bottom), step = (width - left - 6) / rows.length;
  const svg = element("svg", { width, height, role: "img", "aria-label": "Error of each kernel" });
  for (let p = Math.ceil(low); p <= high; p += high - low > 6 ? 2 : 1) svg.append(element("line", { class: "axis", x1: left, x2: width, y1: y(p), y2: y(p) }), element("text", { x: left - 6, y: y(p) + 4, "text-anchor": "end" }, `1e${p}`));
  rows.forEach((r, n) => {
    const ok = Number.isFinite(r.rms), at = ok && r.rms > 0 ? y(Math.log10(r.rms)) : height - bottom - 3;
    const facts = ok ? [["RMS error", r.rms.toExponential(2)], ["largest error", r.error.largest.toExponential(2)], ["dtype", r.dtype]] : [["not measured", r.error.note]];
    const show = (e) => showTip(e.clientX, e.clientY, r.name, [["module", r.module], ...facts]);
    svg.append(element("rect", { class: `mark${isChosen(r) ? " chosen" : ""}`, x: left + n * step, y: at, width: Math.max(0.8, step - 1), height: height - bottom - at, fill: ok ? colour(r) : "var(--line)", onpointermove: show, onpointerleave: hideTip, onclick: () => choose(r.index, "accuracy") }));
  });
  const skipped = rows.length - known.length;
  place.replaceChildren(svg, ...(skipped ? [element("p", { class: "muted", style: "font-size:12px" }, `${skipped} without a figure: the tooltip says why`)] : []));
}
onChoose.push(drawAccuracy);
