"use strict";
(() => {
  const data = JSON.parse(document.getElementById("composer-data").textContent);
  const root = document.getElementById("report");
  const colors = ["#3366cc", "#dc5a2b", "#109618", "#990099", "#0099c6", "#b8860b", "#dd4477", "#66aa00", "#b82e2e", "#316395"];
  const axes = { batch: "batches", epoch: "epochs", sample: "samples", token: "tokens", time_s: "seconds" };
  const most = 60; // charts of a group that are drawn without being asked for
  const view = { axis: "batch", smoothing: 0, log: false, filter: "", hidden: new Set(), shown: new Map() };

  // Names come from anywhere. Nodes take them as text; Plotly reads some tags, so it gets none.
  const plain = (text) => String(text).replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" }[sign]));
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  };
  const table = (head, rows) =>
    make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", {}, cell)))),
      make("tbody", {}, ...rows));
  const cells = (...values) => values.map((value) => make("td", typeof value === "number" ? { class: "number" } : {},
    value instanceof Node ? value : typeof value === "number" ? value.toLocaleString() : String(value ?? "")));
  const bytes = (size) => {
    if (size === null) return "";
    const power = size ? Math.min(4, Math.floor(Math.log2(size) / 10)) : 0;
    return `${(size / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  };
  const duration = (status) => {
    const seconds = Math.floor((Date.parse(status.updated) - Date.parse(status.started)) / 1000);
    if (!Number.isFinite(seconds)) return "";
    const [days, ...clock] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60, seconds % 60].map(Math.floor);
    return (days ? `${days} d ` : "") + clock.map((part) => String(part).padStart(2, "0")).join(":");
  };
  const layout = (more = {}) => ({
    margin: { l: 56, r: 14, t: 12, b: 44 }, height: 260, font: { size: 11 }, hovermode: "x unified", paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal" }, ...more,
  });
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
  const bars = { hovermode: "closest", yaxis: { autorange: "reversed", automargin: true, ticks: "outside", ticklen: 4, tickcolor: "#fff" } };
  const short = (name) => plain(name.length > 40 ? `${name.slice(0, 39)}…` : name);

  function smoothed(values, weight) {
    if (!weight) return values;
    let mean = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return mean / norm;
    });
  }

  // Training and evaluation of one metric lie in one chart.
  function place(name) {
    const match = /^metrics\/([^/]+)\/(.+)$/.exec(name);
    if (match) return { chart: `metrics/${match[2]}`, label: match[1] };
    return { chart: name, label: "" };
  }

  function groupOf(chart) {
    if (/^lr-/.test(chart)) return "learning rate";
    return chart.includes("/") ? chart.split("/")[0] : "other";
  }

  function collect() {
    const groups = new Map();
    data.runs.forEach((run, index) => {
      for (const [name, curve] of Object.entries(run.curves)) {
        const { chart, label } = place(name);
        const charts = groups.get(groupOf(chart)) ?? new Map();
        groups.set(groupOf(chart), charts);
        const curves = charts.get(chart) ?? [];
        charts.set(chart, curves);
        curves.push({ run, index, label, curve });
      }
    });
    const first = ["loss", "metrics", "learning rate", "throughput", "memory"];
    const rank = (name) => (first.indexOf(name) + 1 || first.length + 1);
    return [...groups].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
  }

  // What is no number lies at the upper edge, on an axis of its own; where it begins, a line says what it is.
  function notFinite(x, name, color, curve) {
    const at = Object.keys(curve.not_finite).map(Number);
    if (!at.length) return null;
    const first = x[at[0]];
    return {
      trace: { x: at.map((index) => x[index]), y: at.map(() => 0.97), yaxis: "y2", mode: "markers", name, showlegend: false,
        text: at.map((index) => plain(curve.not_finite[index])), hovertemplate: "%{text}", marker: { symbol: "x-thin", size: 7, line: { color, width: 1.5 } } },
      shape: { type: "line", yref: "paper", y0: 0, y1: 1, x0: first, x1: first, line: { color: "#b42318", dash: "dot", width: 1 },
        label: { text: plain(curve.not_finite[at[0]]), textposition: "start", font: { size: 9, color: "#b42318" } } },
    };
  }

  function draw(node, chart, curves) {
    const traces = [], odd = [];
    for (const { run, index, label, curve } of curves) {
      if (view.hidden.has(index)) continue;
      const x = curve[view.axis], name = plain([data.runs.length > 1 ? run.name : "", label].filter(Boolean).join(" ") || chart);
      const color = colors[(index + (data.runs.length > 1 ? 0 : traces.length)) % colors.length];
      const line = { color, width: 1.6, dash: label && label !== "train" ? "dot" : "solid" };
      const few = curve.values.length < 30;
      if (view.smoothing) {
        traces.push({ x, y: curve.values, name, line: { ...line, width: 1 }, opacity: 0.25, showlegend: false, hoverinfo: "skip", mode: "lines" });
      }
      traces.push({ x, y: smoothed(curve.values, view.smoothing), name, line, mode: few ? "lines+markers" : "lines", marker: { size: 5 } });
      odd.push(notFinite(x, name, color, curve));
    }
    const marked = odd.filter(Boolean);
    // The colours of several runs are those of their names above.
    const showlegend = data.runs.length === 1 && curves.length > 1;
    Plotly.react(node, [...traces, ...marked.map((each) => each.trace)], layout({
      shapes: marked.map((each) => each.shape), showlegend, ...(showlegend ? { margin: { l: 56, r: 14, t: 12, b: 70 } } : {}),
      xaxis: { title: { text: axes[view.axis], standoff: 6 }, zeroline: false },
      yaxis: { type: view.log ? "log" : "linear", zeroline: false, automargin: true },
      yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false },
    }), config);
  }

  function captionOf(chart, curves) {
    const labels = [...new Set(curves.map(({ label }) => label))];
    const isKey = data.runs.length > 1 && labels.length > 1;
    const key = isKey ? ` – ${labels.map((label) => `${label} ${label === "train" ? "solid" : "dotted"}`).join(", ")}` : "";
    return make("figcaption", {}, chart, make("span", { class: "faint" }, key));
  }

  const visible = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && target.redraw) { target.redraw(); target.redraw = null; }
    }
  }, { rootMargin: "400px" });

  function drawCurves(holder) {
    for (const node of holder.querySelectorAll(".chart")) { visible.unobserve(node); Plotly.purge(node); }
    holder.replaceChildren();
    const groups = collect();
    if (!groups.length) holder.append(make("p", { class: "faint" }, "No metrics were logged."));
    for (const [group, charts] of groups) {
      const wanted = [...charts].filter(([chart]) => chart.toLowerCase().includes(view.filter));
      if (!wanted.length) continue;
      const limit = view.shown.get(group) ?? most;
      const grid = make("div", { class: "grid" });
      for (const [chart, curves] of wanted.slice(0, limit)) {
        const node = make("div", { class: "chart", "data-chart": chart });
        node.redraw = () => draw(node, chart, curves);
        visible.observe(node);
        grid.append(make("figure", {}, captionOf(chart, curves), node));
      }
      holder.append(make("h3", {}, `${group} (${wanted.length})`), grid);
      if (wanted.length > limit) {
        const more = () => { view.shown.set(group, limit + most); drawCurves(holder); };
        holder.append(make("button", { onclick: more }, `${wanted.length - limit} more`));
      }
    }
  }

  function overview() {
    const rows = data.runs.map((run, index) => {
      const status = run.status.status ?? "unknown";
      const swatch = make("span", { style: `color:${colors[index % colors.length]}` }, "● ");
      // One that was killed cannot say so.
      const seen = status === "running" ? `, seen last ${String(run.status.updated).slice(0, 19).replace("T", " ")} UTC` : "";
      const state = make("span", { class: status }, status + seen);
      const bad = run.num_bad_lines ? make("div", { class: "faint" }, `${run.num_bad_lines} line(s) of the metrics are cut off`) : null;
      const failure = run.status.error ? make("details", {}, make("summary", {}, "traceback"), make("pre", {}, run.status.error)) : null;
      const reason = run.status.reason ? make("div", { class: "faint" }, run.status.reason) : null;
      return make("tr", {}, ...cells(make("div", {}, swatch, run.name), make("div", {}, state, reason, failure, bad), run.status.epoch ?? 0,
        run.status.batch ?? 0, run.status.sample ?? 0, run.status.token ?? 0, duration(run.status),
        ...["device", "world_size", "torch"].map((name) => run.config[`environment/${name}`] ?? "")));
    });
    const head = ["run", "status", "epochs", "batches", "samples", "tokens", "took", "device", "ranks", "torch"];
    return make("div", { class: "overview" }, table(head, rows));
  }

  function controls(redraw) {
    const axis = make("select", { id: "axis", onchange: () => { view.axis = axis.value; redraw(); } },
      ...Object.entries(axes).map(([value, text]) => make("option", { value }, text)));
    const smoothing = make("input", { id: "smoothing", type: "range", min: 0, max: 0.99, step: 0.01, value: 0,
      oninput: () => { view.smoothing = Number(smoothing.value); redraw(); } });
    const log = make("input", { id: "log", type: "checkbox", onchange: () => { view.log = log.checked; redraw(); } });
    const filter = make("input", { id: "filter", type: "search", placeholder: "part of a metric's name",
      oninput: () => { view.filter = filter.value.toLowerCase(); redraw(); } });
    const runs = data.runs.length > 1 ? data.runs.map((run, index) => {
      const box = make("input", { type: "checkbox", checked: true, "data-run": index, onchange: () => {
        view.hidden[box.checked ? "delete" : "add"](index); redraw();
      } });
      return make("label", {}, box, make("span", { style: `color:${colors[index % colors.length]}` }, run.name));
    }) : [];
    return make("div", { class: "controls" }, make("label", {}, "over", axis), make("label", {}, "smoothing", smoothing),
      make("label", {}, log, "logarithmic"), make("label", {}, "only", filter), ...runs);
  }

  const wide = [];  // what draws the charts that are as wide as the page

  function stepTimes() {
    const parts = [...new Set(data.runs.flatMap((run) => Object.keys(run.times.step ?? {})))];
    const node = make("div", { class: "wide", id: "step-times" });
    const traces = parts.map((part) => ({
      type: "bar", orientation: "h", name: part, y: data.runs.map((run, index) => `${index + 1} ${short(run.name)}`),
      x: data.runs.map((run) => {
        const step = run.times.step ?? {};
        const total = Object.values(step).reduce((sum, seconds) => sum + seconds, 0);
        return total ? (100 * (step[part] ?? 0)) / total : 0;
      }), customdata: data.runs.map((run) => (run.times.step ?? {})[part] ?? 0),
      hovertemplate: "%{x:.1f} %, %{customdata:.2f} s",
    }));
    wide.push(() => Plotly.newPlot(node, traces, layout({ ...bars, barmode: "stack", height: 120 + 36 * data.runs.length,
      margin: { l: 56, r: 14, t: 12, b: 84 }, xaxis: { title: { text: "share of the time in % by the host's clock", standoff: 6 } } }), config));
    const note = make("p", { class: "faint" }, "Each part includes the algorithms and callbacks of the event that ends it: "
      + "waiting for data those of batch_start, preparing the batch those of before_forward, forward those of after_forward, "
      + "loss those of after_loss, backward those of after_backward, after backward those of after_train_batch.");
    const profiled = data.runs.flatMap((run) => (run.times.profiler ?? []).map((row) => [run.name, row]));
    if (!profiled.length) return [node, note];
    profiled.sort((a, b) => b[1].total_s - a[1].total_s);
    const rows = profiled.map(([run, row]) => make("tr", {}, ...cells(run, row.name, row.count, Number(row.total_s.toFixed(4)),
      Number((1000 * row.total_s / row.count).toFixed(4)), Number((1000 * row.longest_s).toFixed(4)))));
    return [node, note, make("h3", {}, "by event, algorithm and callback (profiled batches)"),
      make("div", { class: "scroll" }, table(["run", "name", "count", "total s", "mean ms", "longest ms"], rows))];
  }

  function timelines() {
    return data.runs.flatMap((run, index) => {
      const names = Object.keys(run.acting);
      if (!names.length) return [];
      const node = make("div", { class: "wide" });
      const y = [], base = [], x = [], text = [];
      for (const name of names) {
        for (const [first, last] of run.acting[name].batches) {
          y.push(plain(name)); base.push(first); x.push(last - first + 1); text.push(`batches ${first} to ${last}`);
        }
      }
      wide.push(() => Plotly.newPlot(node, [{ type: "bar", orientation: "h", y, base, x, text, textposition: "none", hovertemplate: "%{y}: %{text}<extra></extra>",
        marker: { color: colors[index % colors.length] } }], layout({ ...bars, height: 70 + 24 * names.length,
        xaxis: { title: { text: "batches", standoff: 6 } } }), config));
      return [make("h3", {}, run.name), node];
    });
  }

  function configuration() {
    const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))].sort();
    const differs = (key) => new Set(data.runs.map((run) => run.config[key])).size > 1;
    const holder = make("div", { class: "scroll settings" });
    const only = make("input", { type: "checkbox", id: "differences", onchange: () => fill() });
    const search = make("input", { type: "search", id: "settings", placeholder: "part of a setting", oninput: () => fill() });
    const fill = () => holder.replaceChildren(table(["setting", ...data.runs.map((run) => run.name)],
      keys.filter((key) => (!only.checked || differs(key)) && key.toLowerCase().includes(search.value.toLowerCase())).map((key) =>
        make("tr", differs(key) ? { class: "differs" } : {}, ...cells(key, ...data.runs.map((run) => run.config[key] ?? "–"))))));
    fill();
    return [make("div", { class: "controls", style: "position:static" }, make("label", {}, "only", search),
      data.runs.length > 1 ? make("label", {}, only, "only what differs") : null), holder];
  }

  function checkpoints() {
    const rows = data.runs.flatMap((run) => run.checkpoints.map((each) => {
      const tone = each.verification === "verified" ? "good" : each.verification.startsWith("damaged") ? "bad" : "faint";
      return make("tr", {}, ...cells(run.name, each.path, bytes(each.size_bytes), make("span", { class: tone }, each.verification)));
    }));
    return rows.length ? table(["run", "checkpoint", "size", "state"], rows) : make("p", { class: "faint" }, "None were saved.");
  }

  function traces() {
    const rows = data.runs.flatMap((run) => run.traces.map((path) => make("tr", {}, ...cells(run.name, path))));
    return rows.length ? [make("h2", {}, "Traces, for Perfetto"), table(["run", "file"], rows)] : [];
  }

  document.title = data.runs.map((run) => run.name).join(", ");
  const curves = make("div", { id: "curves" });
  const timeline = make("div", { id: "timeline" }), times = make("div", {});
  root.append(make("h1", {}, data.runs.length > 1 ? `${data.runs.length} runs` : data.runs[0].name), overview(),
    make("h2", {}, "Curves"), controls(() => drawCurves(curves)), curves,
    make("h2", {}, "Where the time of a step goes"), times,
    make("h2", {}, "Which algorithm acted when"), timeline,
    make("h2", {}, "Configuration"), ...configuration(),
    make("h2", {}, "Checkpoints"), checkpoints(), ...traces());
  drawCurves(curves);
  times.append(...stepTimes());
  const drawn = timelines();
  timeline.append(...(drawn.length ? drawn : [make("p", { class: "faint" }, "No algorithm acted.")]));
  for (const draw of wide) draw();  // only now do their boxes have a width
  document.body.dataset.ready = "yes";
})();
