// The arena over time, what is alive at its peak, and what stays: weights and states.
function drawMemory() {
  const section = current(), place = $("memory");
  const arenas = [...section.arenas].sort((a, b) => b.nbytes - a.nbytes), most = 2;
  const left = element("div", {}, ...arenas.slice(0, most).map((a) => arenaChart(a, section)));
  const rest = arenas.slice(most).reduce((sum, a) => sum + a.nbytes, 0);
  if (rest) left.append(element("p", { class: "muted", style: "font-size:12px;margin-top:8px" }, `and ${arenas.length - most} smaller arenas of other partitions, ${bytes(rest)}`));
  if (!section.arenas.some((a) => a.blocks.length)) left.replaceChildren(element("p", { class: "empty" }, "No buffer needs the arena."));
  const right = element("div", {});
  for (const arena of arenas.slice(0, most)) {
    if (!arena.blocks.length) continue;
    const owners = arena.owners.map((n) => arena.blocks[n]);
    const where = section.rows[arena.rows[arena.peak]] || section.rows[arena.rows[arena.rows.length - 1]];
    right.append(element("h3", {}, `${bytes(arena.live)} in use at the peak, ${where ? where.name : "the end"}${section.arenas.length > 1 ? ` of ${arena.name}` : ""}`));
    right.append(ranking(owners.map((b) => [b.name, b.nbytes, b.tensor]), 8));
  }
  for (const [kind, title] of [["weight", "Weights"], ["state", "State"], ["const", "Constants"]]) {
    const held = data.held.filter((h) => h.kind === kind);
    if (!held.length) continue;
    const total = held.reduce((sum, h) => sum + h.nbytes, 0);
    right.append(element("h3", {}, `${title}: ${bytes(total)} in ${held.length} buffer${held.length > 1 ? "s" : ""}`));
    right.append(ranking(held.map((h) => [h.name, h.nbytes, `${h.tensor} ${h.format}`]), 6));
  }
  place.replaceChildren(element("div", { class: "split" }, left, right));
}

function ranking(items, most) {
  const list = element("div", { class: "list" }), largest = Math.max(...items.map(([, size]) => size), 1);
  for (const [name, size, text] of items.slice(0, most)) {
    const show = (e) => showTip(e.clientX, e.clientY, name, [["tensor", text], ["size", bytes(size)]]);
    list.append(element("span", { class: "name mono", title: `${name} ${text}` }, name),
      element("span", { class: "track", onpointermove: show, onpointerleave: hideTip }, element("i", { style: `width:${(100 * size) / largest}%` })),
      element("span", { class: "value" }, bytes(size)));
  }
  const box = element("div", {}, list);
  if (items.length > most) box.append(element("p", { class: "muted", style: "font-size:12px;margin-top:5px" }, `and ${items.length - most} more, ${bytes(items.slice(most).reduce((sum, [, size]) => sum + size, 0))}`));
  return box;
}

function arenaChart(arena, section) {
  const box = element("div", { class: "arena" });
  if (!arena.blocks.length) return box;
  const width = Math.max(260, ($("memory").clientWidth || 600) * (innerWidth > 900 ? 0.58 : 1)), height = 250, left = 62, top = 8, bottom = 30;
  const steps = Math.max(1, arena.rows.length), owners = new Set(arena.owners);
  const x = (step) => left + (step / (steps + 1)) * (width - left - 8), y = (b) => height - bottom - (b / Math.max(arena.nbytes, 1)) * (height - top - bottom);
  const svg = element("svg", { width, height, role: "img", "aria-label": `Arena of ${bytes(arena.nbytes)}` });
  for (const t of ticks(arena.nbytes, 4)) svg.append(element("line", { class: "axis", x1: left, x2: width - 8, y1: y(t), y2: y(t) }), element("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, bytes(Math.round(t))));
  for (const t of ticks(steps, 6)) if (Number.isInteger(t)) svg.append(element("text", { x: x(t), y: height - bottom + 15, "text-anchor": "middle" }, String(t)));
  svg.append(element("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, "kernel"));
  arena.blocks.forEach((b, n) => {
    const high = Math.max(1, y(b.offset) - y(b.offset + b.nbytes));
    const show = (e) => showTip(e.clientX, e.clientY, b.name, [["tensor", b.tensor], ["size", bytes(b.nbytes)], ["place", `from byte ${b.offset}`], ["alive", `kernels ${b.first} to ${b.last}`]]);
    svg.append(element("rect", { class: "mark", x: x(b.first), y: y(b.offset + b.nbytes), width: Math.max(1, x(b.last + 1) - x(b.first) - 0.5), height: Math.max(0.8, high - 0.5), fill: owners.has(n) ? "var(--c1)" : "var(--c0)", "fill-opacity": owners.has(n) ? 0.9 : 0.45, onpointermove: show, onpointerleave: hideTip }));
  });
  svg.append(element("line", { x1: x(arena.peak + 0.5), x2: x(arena.peak + 0.5), y1: top, y2: height - bottom, stroke: "var(--ink)", "stroke-dasharray": "3 3" }));
  const text = `Arena of ${bytes(arena.nbytes)}${section.arenas.length > 1 ? ` of ${arena.name}` : ""}: ${arena.blocks.length} buffers; orange: alive at the peak`;
  box.append(element("h3", {}, text), svg);
  return box;
}
