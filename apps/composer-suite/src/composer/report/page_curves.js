// Charts of the logged metrics: grouping, order, and drawing when they become visible.
const longest_s = Math.max(0, ...data.runs.flatMap((run) => Object.values(run.curves).map((curve) => curve.time_s.at(-1) ?? 0)));
const clock = longest_s >= 7200 ? { unit: "hours", seconds: 3600 } : longest_s >= 300 ? { unit: "minutes", seconds: 60 } : { unit: "seconds", seconds: 1 };
const axes = { batch: "batches", epoch: "epochs", sample: "samples", token: "tokens", time_s: clock.unit };
const most = 60; // charts of a group shown initially, and added by each click on "more"
const many = 12; // a group of the user's own metrics with more charts than this is collapsed
const view = { axis: "batch", smoothing: 0, log: false, filter: "", hidden: new Set(), shown: new Map(), open: new Set() };

const titles = { loss: "Losses", metrics: "Metrics", throughput: "Throughput", memory: "Memory", time: "Time", trainer: "Trainer", activations: "Activations" };
const firstGroups = ["Losses", "Metrics", "Learning rate", "Gradients", "Throughput", "Memory"];
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
      charts.get(chart).push({ run, index, label, curve, unit: run.units?.[name] });
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

// Non-finite values are marked at the upper edge, on a separate axis; a labeled line marks the first one.
function notFinite(x, name, color, curve) {
  const at = Object.keys(curve.not_finite).map(Number);
  if (!at.length) return null;
  const first = x[at[0]];
  return {
    trace: { x: at.map((index) => x[index]), y: at.map(() => 0.97), yaxis: "y2", mode: "markers", name, showlegend: false,
      text: at.map((index) => plain(curve.not_finite[index])), hovertemplate: "%{text}", marker: { symbol: "x-thin", size: 7, line: { color, width: 1.5 } } },
    shape: { type: "line", yref: "paper", y0: 0, y1: 1, x0: first, x1: first, line: { color: "#b42318", dash: "dot", width: 1 },
      label: { text: plain(curve.not_finite[at[0]]), textposition: "middle", textangle: 0, xanchor: "left", font: { size: 9, color: "#b42318" } } },
  };
}

const xOf = (curve) => (view.axis === "time_s" ? curve.time_s.map((seconds) => seconds / clock.seconds) : curve[view.axis]);

function draw(node) {
  const { chart, curves } = node, traces = [], odd = [];
  for (const { run, index, label, curve } of curves) {
    if (view.hidden.has(index)) continue;
    const x = xOf(curve), name = plain([data.runs.length > 1 ? run.name : "", label].filter(Boolean).join(" ") || chart);
    const color = colorOf(index + (data.runs.length > 1 ? 0 : traces.length));
    const line = { color, width: 1.6, dash: label && label !== "train" ? "dot" : "solid" };
    const few = curve.values.length < 30;
    if (view.smoothing) {
      traces.push({ x, y: curve.values, name, line: { ...line, width: 1 }, opacity: 0.25, showlegend: false, hoverinfo: "skip", mode: "lines" });
    }
    traces.push({ x, y: smoothed(curve.values, view.smoothing), name, line, mode: few ? "lines+markers" : "lines", marker: { size: 5 } });
    odd.push(notFinite(x, name, color, curve));
  }
  const marked = odd.filter(Boolean);
  // With several runs, the colored names above the charts are the legend.
  const showlegend = data.runs.length === 1 && curves.length > 1;
  const units = [...new Set(curves.map(({ unit }) => unit).filter(Boolean))];
  Plotly.react(node, [...traces, ...marked.map((each) => each.trace)], layout({
    shapes: marked.map((each) => each.shape), showlegend, ...(showlegend ? { margin: { l: 56, r: 14, t: 26, b: 70 } } : {}),
    // An unchanged `uirevision` keeps the zoom when runs are hidden or curves are smoothed.
    xaxis: { title: { text: axes[view.axis], standoff: 6 }, zeroline: false, uirevision: view.axis },
    yaxis: { type: view.log ? "log" : "linear", zeroline: false, automargin: true, uirevision: String(view.log),
      ...(units.length ? { title: { text: plain(units.join(" or ")), standoff: 6 } } : {}) },
    yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false },
  }), config);
}

function captionOf(chart, curves) {
  const labels = [...new Set(curves.map(({ label }) => label))];
  const isKey = data.runs.length > 1 && labels.length > 1;
  const key = isKey ? ` – ${labels.map((label) => `${label} ${label === "train" ? "solid" : "dotted"}`).join(", ")}` : "";
  return make("figcaption", {}, chart, make("span", { class: "faint" }, key));
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

function drawAnew() {
  for (const node of document.querySelectorAll(".chart")) stale.add(node);
  askFrame();
}

function clear(holder) {
  for (const node of holder.querySelectorAll(".chart")) {
    visible.unobserve(node);
    inSight.delete(node);
    stale.delete(node);
    Plotly.purge(node); // Plotly would otherwise keep the chart in memory
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
    grid.append(make("figure", {}, captionOf(chart, curves), node));
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
    const wanted = group.charts.filter(([chart]) => chart.toLowerCase().includes(view.filter));
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
