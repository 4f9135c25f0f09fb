// Charts of the logged metrics: grouping, order, and drawing when they become visible.
const longest_s = Math.max(0, ...data.runs.flatMap((run) => Object.values(run.curves).map((curve) => curve.time_s.at(-1) ?? 0)));
const clock = longest_s >= 7200 ? { unit: "hours", seconds: 3600 } : longest_s >= 300 ? { unit: "minutes", seconds: 60 } : { unit: "seconds", seconds: 1 };
const axes = { batch: "batches", epoch: "epochs", sample: "samples", token: "tokens", time_s: clock.unit };
const most = 60; // charts of a group shown initially, and added by each click on "more"
const many = 12; // a group of the user's own metrics with more charts than this is collapsed
const view = { axis: "batch", smoothing: 0, log: false, filter: "", hidden: new Set(), shown: new Map(), open: new Set() };

const titles = { loss: "Losses", metrics: "Metrics", schedule: "Schedules", throughput: "Throughput", memory: "Memory", time: "Time", trainer: "Trainer", activations: "Activations" };
const firstGroups = ["Losses", "Metrics", "Learning rate", "Schedules", "Gradients", "Throughput", "Memory"];
const secondGroups = ["Norms of layers", "Activations", "Time", "Trainer", "Machine"];

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    // Dividing by the sum of the weights corrects the bias of the first values towards 0.
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

// The curves of a metric in training and in evaluations share a chart.
function place(name) {
  const match = /^metrics\/([^/]+)\/(.+)$/.exec(name);
  if (match) return { chart: `metrics/${match[2]}`, label: match[1] };
  return { chart: name, label: "" };
}

function groupOf(chart) {
  if (/^lr-/.test(chart)) return "Learning rate";
  if (/^((min|max)_)?(cpu|disk|network|gpu|memory)_\w+$/.test(chart)) return "Machine";
  if (/^l2_norm\//.test(chart)) return chart.endsWith("/global") ? "Gradients" : "Norms of layers";
  if (!chart.includes("/")) return "other";
  const first = chart.split("/")[0];
  return Object.hasOwn(titles, first) ? titles[first] : first;
}

// Natural order, so that layer 10 follows layer 9. Metrics per device come after those of all devices.
const byName = ([one], [other]) =>
  one.includes("/device/") - other.includes("/device/") || one.localeCompare(other, "en", { numeric: true });

// Groups of charts in the order of the page: the most important ones, the user's own, and large ones, collapsed.
function collect() {
  const groups = new Map();
  data.runs.forEach((run, index) => {
    for (const [name, curve] of Object.entries(run.curves)) {
      const { chart, label } = place(name);
      const title = groupOf(chart);
      if (!groups.has(title)) groups.set(title, new Map());
      const charts = groups.get(title);
      if (!charts.has(chart)) charts.set(chart, []);
      charts.get(chart).push({ name, run, index, label, curve, unit: run.units?.[name] });
    }
  });
  const isTrain = ({ label }) => label === "train";
  for (const charts of groups.values()) {
    for (const curves of charts.values()) curves.sort((one, other) => one.index - other.index || isTrain(other) - isTrain(one));
  }
  const rank = (title) => (firstGroups.indexOf(title) + 1 || firstGroups.length + 1) + 100 * (secondGroups.indexOf(title) + 1);
  return [...groups].sort(([a], [b]) => rank(a) - rank(b) || byName([a], [b])).map(([title, charts], number) => ({
    title, charts: [...charts].sort(byName), id: `curves-${number}`,
    isSecond: secondGroups.includes(title) || (!firstGroups.includes(title) && charts.size > many),
  }));
}

// Non-finite values are marked at the upper edge; a labeled line marks the first one.
function notFinite(x, color, curve) {
  const at = Object.keys(curve.not_finite).map(Number);
  return at.length ? { color, marks: at.map((index) => x[index]), first: x[at[0]], text: curve.not_finite[at[0]] } : null;
}

const xOf = (curve) => (view.axis === "time_s" ? curve.time_s.map((seconds) => seconds / clock.seconds) : curve[view.axis]);

// Values of evaluations, schedules, counts and times are exact: only what is measured on a batch is noisy.
const isExact = (chart, label) => (label !== "" && label !== "train") || /^(lr-|time\/|trainer\/)/.test(chart)
  || /(^|[/_.-])(eval|val|valid|validation|test)([/_.-]|$)/i.test(chart) || scheduled.test(chart);
const scheduled = /^(seq_length_warmup|layer_freezing|progressive_resizing|ema|alibi|stochastic_depth)\/|schedule|learning_rate|(^|[/_])lr([/_]|$)/i;

const dashes = ["none", "5 3", "1.5 3", "8 3 1.5 3"];
// Training is solid, and each evaluation has its own dashes.
function dashOf(label, curves) {
  const others = [...new Set(curves.map((curve) => curve.label))].filter((one) => one !== "train" && one !== "");
  return label === "train" || label === "" ? dashes[0] : dashes[1 + (others.indexOf(label) % (dashes.length - 1))];
}

const colorIn = (curves, { index, label }) =>
  colorOf(data.runs.length > 1 ? index : [...new Set(curves.map((curve) => curve.label))].indexOf(label));

function draw(node) {
  const { chart, curves } = node, raw = [], lines = [], odd = [];
  for (const each of curves) {
    const { run, index, label, curve } = each;
    if (view.hidden.has(index)) continue;
    const x = xOf(curve), color = colorIn(curves, each);
    const name = [data.runs.length > 1 ? run.name : "", label].filter(Boolean).join(" ") || chart;
    const line = { name, x, color, dash: dashOf(label, curves), run: index, isMarked: curve.values.length < 30 };
    const isSmooth = view.smoothing > 0 && !isExact(chart, label);
    if (isSmooth) raw.push({ ...line, y: curve.values, isRaw: true });
    lines.push({ ...line, y: isSmooth ? smoothed(curve.values, view.smoothing) : curve.values });
    odd.push(notFinite(x, color, curve));
  }
  const yTitle = [...new Set(curves.map(({ unit }) => unit).filter(Boolean))].join(" or ");
  drawChart(node, { lines: [...raw, ...lines], odd: odd.filter(Boolean), xTitle: axes[view.axis], yTitle, isLog: view.log, zoomKey: view.axis });
}

function captionOf(chart, curves, node) {
  const labels = [...new Set(curves.map(({ label }) => label))].filter(Boolean);
  const color = (label) => (data.runs.length > 1 ? "currentColor" : colorIn(curves, { label }));
  const keys = labels.map((label) => make("span", { class: "label" }, lineKey(color(label), dashOf(label, curves)), label));
  const reset = make("button", { class: "reset", hidden: true, onclick: () => setZoom(node, null) }, "reset zoom");
  return make("figcaption", {}, make("span", {}, chart.replace(/^metrics\//, "")), ...keys, reset);
}

// Charts are drawn when they become visible. Visible ones are redrawn at most once per frame, after all changes.
const inSight = new Set(), stale = new Set();
const budget_ms = 40; // of drawing per frame, so that a slider stays responsive with many charts
let isFrameAsked = false;
const drawStale = () => {
  isFrameAsked = false;
  const end = performance.now() + budget_ms;
  for (const node of inSight) {
    if (!stale.delete(node)) continue;
    draw(node);
    if (performance.now() > end) return askFrame();
  }
};
const askFrame = () => {
  if (!isFrameAsked) requestAnimationFrame(drawStale);
  isFrameAsked = true;
};
const visible = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) inSight[isIntersecting ? "add" : "delete"](target);
  drawStale();
}, { rootMargin: "400px" }); // draw shortly before a chart is scrolled into view

// A chart is as wide as its node, which changes with the window and with what is drawn around it.
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.drawn && target.drawn.width !== target.clientWidth) stale.add(target);
  askFrame();
});

function drawAnew() {
  for (const node of document.querySelectorAll(".chart")) stale.add(node);
  askFrame();
}

function clear(holder) {
  for (const node of holder.querySelectorAll(".chart")) {
    visible.unobserve(node);
    resized.unobserve(node);
    inSight.delete(node);
    stale.delete(node);
  }
  holder.replaceChildren();
}

function fill(holder, group, wanted) {
  clear(holder);
  const limit = view.shown.get(group.id) ?? most;
  const grid = make("div", { class: "grid" });
  for (const [chart, curves] of wanted.slice(0, limit)) {
    const node = Object.assign(make("div", { class: "chart", "data-chart": chart }), { chart, curves });
    stale.add(node);
    visible.observe(node);
    resized.observe(node);
    grid.append(make("figure", {}, captionOf(chart, curves, node), node));
  }
  holder.append(grid);
  if (wanted.length > limit) {
    const more = () => { view.shown.set(group.id, limit + most); fill(holder, group, wanted); };
    holder.append(make("button", { onclick: more }, `${wanted.length - limit} more`));
  }
}

function closable(group, wanted) {
  const holder = make("div", {});
  const node = make("details", { id: group.id, open: view.open.has(group.id) || view.filter !== "" },
    make("summary", {}, make("h2", {}, group.title, make("span", { class: "faint" }, ` (${wanted.length})`))), holder);
  const follow = () => {
    if (!view.filter) view.open[node.open ? "add" : "delete"](group.id);
    if (node.open && !holder.firstChild) fill(holder, group, wanted);
  };
  node.addEventListener("toggle", follow);
  return node;
}

function drawCurves(groups, holders) {
  for (const holder of Object.values(holders)) clear(holder);
  if (!groups.length) holders.first.append(make("p", { class: "faint" }, "No metrics were logged."));
  for (const group of groups) {
    const wanted = group.charts.filter(([, curves]) => curves.some(({ name }) => name.toLowerCase().includes(view.filter)));
    if (!wanted.length) continue;
    if (group.isSecond) {
      (view.filter ? holders.first : holders.second).append(closable(group, wanted)); // search results are shown at the top
    } else {
      const holder = make("div", {});
      const columns = Math.min(wanted.length, most);  // small groups share a row
      const style = `flex: ${columns} 1 ${columns * 432 - 12}px`;
      holders.first.append(make("section", { id: group.id, style }, make("h2", {}, group.title), holder));
      fill(holder, group, wanted);
    }
  }
  if (view.filter && !holders.first.firstChild) {
    holders.first.append(make("p", { class: "faint" }, `No metric has “${view.filter}” in its name.`));
  }
}
