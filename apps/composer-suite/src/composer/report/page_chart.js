// A line chart as SVG: axes, lines, a legend of the values at the pointer, and zooming by dragging.
const chartHeight = 250;
const svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// About `count` round numbers of a range.
function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  // By index, because adding up fractions would add up their rounding.
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) ticks.push(index * step + 0);  // + 0 makes -0 plain 0
  return { ticks, format: formatFor(step, Math.max(Math.abs(low), Math.abs(high))) };
}

function formatFor(step, largest) {
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (largest >= 1e16 || (decimals > 5 && largest < 1e-3)) return (value) => (value ? value.toExponential(1) : "0");
  if (largest >= 1e5) {
    const digits = Math.max(1, Math.ceil(Math.log10(largest / step)) + 1);
    return (value) => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: Math.min(digits, 21) });
  }
  return (value) => value.toLocaleString("en", { minimumFractionDigits: Math.min(decimals, 20), maximumFractionDigits: Math.min(decimals, 20) });
}

function logTicks(low, high) {
  for (const factors of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      ticks.push(...factors.map((factor) => factor * 10 ** power).filter((tick) => tick >= low * 0.999 && tick <= high * 1.001));
    }
    const format = (value) => (value < 1e-3 || value >= 1e5 ? value.toExponential(0) : String(Number(value.toPrecision(3))));
    if (ticks.length > 2) return { ticks: ticks.filter((_, index) => index % Math.ceil(ticks.length / 7) === 0), format };
  }
  return linearTicks(low, high, 4);
}

function rangeOf(lines, key, within, positive) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (let index = 0; index < line.x.length; index += 1) {
      const value = line[key][index];
      if (value === null || (positive && value <= 0) || line.x[index] < within[0] || line.x[index] > within[1]) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

function padded([low, high], isLog, share = 0.06) {
  // Means of one value differ by rounding, and there are no round numbers between them.
  const isConstant = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high));
  if (isLog) return isConstant ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
  // A constant gets some room around it, so that it is not drawn as noise.
  const room = isConstant ? Math.abs(low) * 0.1 || 1 : (high - low) * share;
  return [low - room, high + room];
}

// Draw `lines` ({name, x, y, color, dash, run, isRaw, isMarked}) and `odd` ({x, text, color}) into a node.
function drawChart(node, { lines, odd, xTitle, yTitle, isLog, zoomKey }) {
  if (node.zoom && node.zoom.key !== zoomKey) node.zoom = null;  // of another axis
  const everything = rangeOf(lines, "x", [-Infinity, Infinity], false) ?? [0, 1];
  const xRange = node.zoom?.range ?? padded(everything, false, 0.012);  // room for the marks of the first and the last point
  const found = rangeOf(lines, "y", xRange, isLog);
  const yRange = padded(found ?? (isLog ? [0.1, 1] : [0, 1]), isLog);
  const yTicks = isLog ? logTicks(...yRange) : linearTicks(...yRange, 5);
  const labels = yTicks.ticks.map(yTicks.format);
  const width = Math.max(200, node.clientWidth);
  const left = 14 + (yTitle ? 18 : 0) + 6.6 * Math.max(1, ...labels.map((label) => label.length));
  const box = { left, top: 10, width: width - left - 16, height: chartHeight - 52 };
  const scale = (value) => (isLog ? Math.log(value) : value);
  const [bottom, top] = yRange.map(scale);
  const xOf = (value) => (box.width * (value - xRange[0])) / (xRange[1] - xRange[0]);
  const yOf = (value) => box.height * (1 - (scale(value) - bottom) / (top - bottom));

  const image = svg("svg", { width, height: chartHeight, role: "img", "aria-label": node.dataset.chart ?? "" });
  const plot = svg("svg", { x: box.left, y: box.top, width: box.width, height: box.height });  // a nested svg clips what is outside
  for (const [index, tick] of yTicks.ticks.entries()) {
    const y = box.top + yOf(tick);
    image.append(svg("line", { class: "grid-line", x1: box.left, x2: box.left + box.width, y1: y, y2: y }),
      svg("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, labels[index]));
  }
  const xTicks = linearTicks(...xRange, Math.max(2, Math.min(8, box.width / 55)));
  for (const tick of xTicks.ticks) {
    image.append(svg("text", { x: box.left + xOf(tick), y: box.top + box.height + 16, "text-anchor": "middle" }, xTicks.format(tick)));
  }
  image.append(svg("line", { class: "axis-line", x1: box.left, x2: box.left + box.width, y1: box.top + box.height, y2: box.top + box.height }),
    svg("text", { x: box.left + box.width / 2, y: chartHeight - 6, "text-anchor": "middle" }, xTitle));
  if (yTitle) {
    const middle = box.top + box.height / 2;
    image.append(svg("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, yTitle));
  }
  for (const line of lines) {
    plot.append(svg("path", { d: pathOf(line, xOf, yOf, isLog), class: line.isRaw ? "curve raw" : "curve", "data-run": line.run,
      style: `stroke:${line.color};stroke-dasharray:${line.dash}` }));
    if (!line.isMarked || line.isRaw) continue;
    line.y.forEach((value, index) => {
      if (value === null || (isLog && value <= 0)) return;
      plot.append(svg("circle", { cx: xOf(line.x[index]), cy: yOf(value), r: 2.5, "data-run": line.run, style: `fill:${line.color}` }));
    });
  }
  for (const { color, marks, first, text } of odd) {
    for (const x of marks) plot.append(svg("path", { class: "odd", d: `M${xOf(x) - 3} 4l6 6m0 -6l-6 6`, style: `stroke:${color}` }));
    plot.append(svg("line", { class: "odd-line", x1: xOf(first), x2: xOf(first), y1: 0, y2: box.height }),
      svg("text", { class: "bad", x: xOf(first) + 4, y: box.height / 2 }, text));
  }
  if (!found) plot.append(svg("text", { x: box.width / 2, y: box.height / 2, "text-anchor": "middle" }, isLog ? "nothing above 0" : "no finite values"));
  image.append(plot);
  node.replaceChildren(image);
  node.drawn = { width: node.clientWidth, lines, odd, xRange, yRange, xTitle, yTitle, isLog, box };
  listen(node, image, plot, { box, xOf, yOf, xRange, zoomKey });
}

function pathOf(line, xOf, yOf, isLog) {
  const parts = [];
  let isPen = false;
  for (let index = 0; index < line.x.length; index += 1) {
    const value = line.y[index];
    if (value === null || (isLog && value <= 0)) {
      isPen = false;
      continue;
    }
    parts.push(`${isPen ? "L" : "M"}${xOf(line.x[index]).toFixed(1)} ${yOf(value).toFixed(1)}`);
    isPen = true;
  }
  return parts.join("");
}

// The index of the point nearest to a position.
function nearest(x, position) {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= position) low = middle;
    else high = middle;
  }
  return Math.abs(x[low] - position) <= Math.abs(x[high] - position) ? low : high;
}

// In the box at the pointer; with more lines, those nearest to it.
const mostValues = (width) => (width < 400 ? 6 : 12);

function listen(node, image, plot, { box, xOf, yOf, xRange, zoomKey }) {
  const cross = svg("line", { class: "cross", y1: 0, y2: box.height, visibility: "hidden" });
  const picked = svg("g"), chosen = svg("rect", { class: "chosen", y: 0, height: box.height, width: 0 });
  plot.append(chosen, cross, picked);
  const tip = make("div", { class: "tip", hidden: true });
  node.append(tip);
  let start = null;
  const place = (event) => {
    const { left, top } = image.getBoundingClientRect();
    return { x: Math.max(0, Math.min(box.width, event.clientX - left - box.left)), y: event.clientY - top - box.top };
  };
  const valueAt = (x) => xRange[0] + (x / box.width) * (xRange[1] - xRange[0]);
  const leave = () => {
    tip.hidden = true;
    cross.setAttribute("visibility", "hidden");
    picked.replaceChildren();
  };
  const point = ({ x, y }) => {
    const rows = node.drawn.lines.filter((line) => !line.isRaw && line.x.length).map((line) => {
      const index = nearest(line.x, valueAt(x)), value = line.y[index];
      return { line, at: line.x[index], value, far: value === null ? Infinity : Math.abs(yOf(value) - y) };
    });
    if (!rows.length) return;
    const shown = rows.length > mostValues(node.clientWidth) ? [...rows].sort((a, b) => a.far - b.far).slice(0, mostValues(node.clientWidth)) : rows;
    // Lines have points at different places, so those far from the one nearest to the pointer name theirs.
    const main = shown.reduce((best, row) => (Math.abs(row.at - valueAt(x)) < Math.abs(best.at - valueAt(x)) ? row : best)).at;
    tip.replaceChildren(make("div", { class: "faint" }, `${node.drawn.xTitle} ${exact(main)}`), ...shown.map(({ line, at, value }) =>
      make("div", { class: "row" }, lineKey(line.color, line.dash), make("span", { class: "name" }, line.name),
        make("b", {}, value === null ? "–" : exact(value)), at === main ? null : make("span", { class: "faint" }, `at ${exact(at)}`))));
    if (rows.length > shown.length) tip.append(make("div", { class: "faint" }, `and ${rows.length - shown.length} more`));
    tip.hidden = false;
    const side = box.left + x < node.clientWidth / 2 ? box.left + x + 12 : box.left + x - tip.offsetWidth - 12;
    tip.style.left = `${Math.max(0, Math.min(side, node.clientWidth - tip.offsetWidth))}px`;
    for (const [name, value] of [["x1", xOf(main)], ["x2", xOf(main)], ["visibility", "visible"]]) cross.setAttribute(name, value);
    picked.replaceChildren(...shown.filter(({ far }) => Number.isFinite(far)).map(({ line, at, value }) =>
      svg("circle", { cx: xOf(at), cy: yOf(value), r: 3.5, style: `fill:${line.color}` })));
  };
  plot.append(svg("rect", { class: "sensor", width: box.width, height: box.height }));
  const sensor = plot.lastChild;
  sensor.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    start = place(event).x;
    sensor.setPointerCapture(event.pointerId);
  });
  sensor.addEventListener("pointermove", (event) => {
    const now = place(event);
    point(now);
    if (start === null) return;
    chosen.setAttribute("x", Math.min(start, now.x));
    chosen.setAttribute("width", Math.abs(now.x - start));
  });
  sensor.addEventListener("pointerup", (event) => {
    const ends = start === null ? null : [start, place(event).x].sort((a, b) => a - b);
    start = null;
    chosen.setAttribute("width", 0);
    if (ends && ends[1] - ends[0] > 6 && valueAt(ends[1]) - valueAt(ends[0]) > 1e-6) setZoom(node, { key: zoomKey, range: ends.map(valueAt) });
  });
  sensor.addEventListener("pointercancel", () => { start = null; chosen.setAttribute("width", 0); leave(); });
  sensor.addEventListener("pointerleave", leave);
  sensor.addEventListener("dblclick", () => setZoom(node, null));
}

function setZoom(node, zoom) {
  node.zoom = zoom;
  const reset = node.parentNode.querySelector(".reset");
  if (reset) reset.hidden = zoom === null;
  draw(node);
}

// A short piece of a line, for legends.
const lineKey = (color, dash) => svg("svg", { class: "key", width: 22, height: 8, "aria-hidden": "true" },
  svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, style: `stroke:${color};stroke-width:2;stroke-dasharray:${dash}` }));
