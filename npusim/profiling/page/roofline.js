// Rate over arithmetic intensity, both logarithmic, below the limits of the device.
function drawRoofline() {
  const place = $("roofline"), limits = data.limits;
  const rows = current().rows.filter((r) => r.device === "npu" && r.flops > 0 && r.read + r.written > 0 && r.seconds > 0);
  if (!limits || !rows.length) {
    const why = limits ? "No kernel computes anything: there is nothing to compare with the roofline." : "The limits of this device are unknown.";
    place.replaceChildren(element("p", { class: "empty" }, why));
    return;
  }
  const width = widthOf(place), height = 320, left = 56, right = 14, top = 12, bottom = 38;
  const dtypes = [...new Set(rows.map((r) => r.dtype))].filter((d) => limits.flops[d]);
  const peaks = [...new Map((dtypes.length ? dtypes : ["float32"]).map((d) => [limits.flops[d], d]))].filter(([rate]) => rate > 0).sort((a, b) => b[0] - a[0]);
  const highest = peaks.length ? peaks[0][0] : Math.max(...rows.map((r) => r.flops / r.seconds));
  const intensity = (r) => r.flops / (r.read + r.written), rate = (r) => r.flops / r.seconds;
  const xs = rows.map(intensity), ys = rows.map(rate);
  const low = Math.floor(Math.log10(Math.min(...xs, 0.5))), high = Math.ceil(Math.log10(Math.max(...xs, (2 * highest) / limits.memory)));
  const bottomRate = Math.floor(Math.log10(Math.min(...ys, highest / 20)) * 2) / 2, topRate = Math.log10(Math.max(highest * 1.8, 1.3 * Math.max(...ys)));
  const x = (v) => left + ((Math.log10(v) - low) / (high - low)) * (width - left - right);
  const y = (v) => top + ((topRate - Math.log10(v)) / (topRate - bottomRate)) * (height - top - bottom);
  const svg = element("svg", { width, height, role: "img", "aria-label": `Roofline of ${rows.length} kernels` });
  for (let p = low; p <= high; p++) {
    svg.append(element("line", { class: "axis", x1: x(10 ** p), x2: x(10 ** p), y1: top, y2: height - bottom }), element("text", { x: x(10 ** p), y: height - bottom + 15, "text-anchor": "middle" }, p < 0 ? (10 ** p).toFixed(-p) : String(10 ** p)));
  }
  for (let p = Math.ceil(bottomRate); p <= topRate; p++) {
    svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: y(10 ** p), y2: y(10 ** p) }), element("text", { x: left - 6, y: y(10 ** p) + 4, "text-anchor": "end" }, scaled(10 ** p, "")));
  }
  svg.append(element("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "FLOP per byte"), element("text", { x: left - 6, y: top - 1, "text-anchor": "end" }, "FLOP/s"));
  const slope = (bandwidth, kind, label, below) => {
    const from = 10 ** low, to = Math.min(10 ** high, highest / bandwidth);
    const start = Math.max(from, 10 ** bottomRate / bandwidth);
    svg.append(element("path", { class: `roof ${kind}`, d: `M${x(start)},${y(start * bandwidth)}L${x(to)},${y(to * bandwidth)}` }));
    const at = start * (to / start) ** 0.32, angle = (-Math.atan2(y(start * bandwidth) - y(to * bandwidth), x(to) - x(start)) * 180) / Math.PI;
    svg.append(element("text", { transform: `translate(${x(at)},${y(at * bandwidth)}) rotate(${angle})`, dy: below ? 13 : -5 }, `${label} ${scaled(bandwidth, "B/s")}`));
  };
  const rates = [...new Set(limits.caches.map(([, bandwidth]) => bandwidth))].filter((b) => b > 1.3 * limits.memory);
  if (rates.length) slope(Math.max(...rates), "cache", "cache");
  slope(limits.memory, "", "memory", true);
  for (const [peak, dtype] of peaks) {
    svg.append(element("path", { class: "roof", d: `M${x(Math.max(10 ** low, peak / limits.memory))},${y(peak)}L${width - right},${y(peak)}` }), element("text", { x: width - right, y: y(peak) - 5, "text-anchor": "end" }, `${dtype} ${scaled(peak, "FLOP/s")}`));
  }
  const largest = Math.max(...rows.map((r) => r.seconds));
  for (const r of [...rows].sort((a, b) => b.seconds - a.seconds)) {
    const size = 3 + 13 * Math.sqrt(r.seconds / largest);
    svg.append(element("circle", { class: `mark${isChosen(r) ? " chosen" : ""}`, cx: x(intensity(r)), cy: y(rate(r)), r: size, fill: colour(r), "fill-opacity": 0.62, stroke: "var(--panel)", ...tipFor(r), onclick: () => choose(r.index, "roofline") }));
  }
  const hidden = current().rows.filter((r) => r.device === "npu").length - rows.length;
  const more = [hidden ? `${hidden} kernel${hidden > 1 ? "s" : ""} without arithmetic not shown` : "", rows.some((r) => r.kind === "winograd") ? "Winograd's kernels need a quarter of the operations that are counted" : ""];
  const note = ["area: time", limits.source, ...more].filter(Boolean).join(" · ");
  place.replaceChildren(svg, element("p", { class: "muted", style: "font-size:12px;margin-top:6px" }, note));
}
onChoose.push(drawRoofline);
