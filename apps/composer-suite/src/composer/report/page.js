// The page: its sections in order, and the links to them.
const nameOf = (run, index) => make("h3", {}, make("span", { style: `color:${colorOf(index)}` }, "● "), run.name);

function overview() {
  const head = ["run", "status", "epochs", "batches", "samples", "tokens", "took", "device", "ranks", "torch"];
  const rows = data.runs.flatMap((run, index) => {
    const status = run.status.status ?? "unknown";
    const swatch = make("span", { style: `color:${colorOf(index)}` }, "● ");
    // A killed run still has the status "running", so the time of its last update is shown.
    const seen = status === "running" ? `, seen last ${String(run.status.updated).slice(0, 19).replace("T", " ")} UTC` : "";
    const state = make("span", { class: status }, status + seen);
    const bad = run.num_bad_lines ? make("div", { class: "faint" }, `${run.num_bad_lines} line(s) of the metrics are cut off`) : null;
    const reason = run.status.reason ? make("div", { class: "faint" }, run.status.reason) : null;
    const row = make("tr", {}, ...cells(make("div", {}, swatch, run.name), make("div", {}, state, reason, bad), run.status.epoch ?? 0,
      run.status.batch ?? 0, run.status.sample ?? 0, run.status.token ?? 0, duration(run.status),
      ...["device", "world_size", "torch"].map((name) => run.config[`environment/${name}`] ?? "")));
    return run.status.error ? [row, make("tr", {}, make("td", { colspan: head.length }, failure(run.status.error)))] : [row];
  });
  return make("div", { class: "overview" }, table(head, rows));
}

// The summary is the line of the traceback with the exception, which notes may follow.
function failure(text) {
  const lines = text.trimEnd().split("\n");
  const told = lines.findLast((line) => /^[A-Za-z_][\w.]*(: |$)/.test(line)) ?? lines.at(-1);
  return make("details", { class: "failure" }, make("summary", {}, told), make("pre", {}, text));
}

function controls(onView, onFilter) {
  const axis = make("select", { id: "axis", onchange: () => { view.axis = axis.value; onView(); } },
    ...Object.entries(axes).map(([value, text]) => make("option", { value }, text)));
  const smoothing = make("input", { id: "smoothing", type: "range", min: 0, max: 0.99, step: 0.01, value: 0,
    oninput: () => { view.smoothing = Number(smoothing.value); onView(); } });
  const log = make("input", { id: "log", type: "checkbox", onchange: () => { view.log = log.checked; onView(); } });
  const filter = make("input", { id: "filter", type: "search", placeholder: "part of a metric's name",
    oninput: () => { view.filter = filter.value.toLowerCase(); onFilter(); } });
  const runs = data.runs.length > 1 ? data.runs.map((run, index) => {
    const box = make("input", { type: "checkbox", checked: true, "data-run": index, onchange: () => {
      view.hidden[box.checked ? "delete" : "add"](index); onView();
    } });
    return make("label", {}, box, make("span", { style: `color:${colorOf(index)}` }, run.name));
  }) : [];
  return make("div", { class: "controls" }, make("label", {}, "over", axis), make("label", {}, "smoothing", smoothing),
    make("label", {}, log, "logarithmic"), make("label", {}, "only", filter),
    runs.length ? make("div", { class: "runs" }, ...runs) : null);
}

const wide = [];  // functions that draw the full-width charts

function stepTimes() {
  const parts = [...new Set(data.runs.flatMap((run) => Object.keys(run.times.step ?? {})))];
  if (!parts.length) return [make("p", { class: "faint" }, "No times were recorded.")];
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
  wide.push(() => Plotly.newPlot(node, traces, layout({ ...bars, barmode: "stack", height: 134 + 36 * data.runs.length,
    margin: { l: 56, r: 14, t: 26, b: 84 }, xaxis: { title: { text: "share of the time in % by the host's clock", standoff: 6 } } }), config));
  const note = make("p", { class: "faint" }, "Each part includes the algorithms and callbacks of the event that ends it: "
    + "waiting for data those of batch_start, preparing the batch those of before_forward, forward those of after_forward, "
    + "loss those of after_loss, backward those of after_backward, after backward those of after_train_batch.");
  return [node, note];
}

function profiledEvents() {
  const whole = (value) => value.toLocaleString("en");
  const milliseconds = (seconds) => (1000 * seconds).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
  const columns = [
    { title: "name", key: "name", isText: true }, { title: "count", key: "count", show: whole },
    { title: "total s", key: "total_s", show: (value) => value.toFixed(3) }, { title: "mean ms", key: "mean_s", show: milliseconds },
    { title: "median ms", key: "median_s", show: milliseconds }, { title: "p95 ms", key: "p95_s", show: milliseconds },
    { title: "longest ms", key: "longest_s", show: milliseconds },
    { title: "% of steps", key: "share_of_steps", show: (value) => (100 * value).toFixed(1) },
  ];
  const missing = { median_s: null, p95_s: null, share_of_steps: null };  // not recorded by earlier releases
  return data.runs.flatMap((run, index) => {
    const records = (run.times.profiler ?? []).map((row) => ({ ...missing, ...row, mean_s: row.total_s / row.count }));
    if (!records.length) return [];
    return [nameOf(run, index), make("div", { class: "scroll", tabindex: 0 }, sortable(columns, records, { key: "total_s" }))];
  });
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
      marker: { color: colorOf(index) } }], layout({ ...bars, height: 84 + 24 * names.length,
      xaxis: { title: { text: "batches", standoff: 6 } } }), config));
    return [nameOf(run, index), node];
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
  return rows.length ? [table(["run", "file"], rows)] : [];
}

function section(id, title, ...nodes) {
  return make("section", { id }, make("h2", {}, title), ...nodes);
}

// Open the collapsed target of a link, also if the address does not change, which causes no `hashchange`.
function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement && !target.open) {
    target.addEventListener("toggle", () => target.scrollIntoView(), { once: true });  // only then does it have its full height
    target.open = true;
  }
  target?.scrollIntoView();
}

function contents(entries) {
  const link = ([id, title]) => make("a", { href: `#${id}`, onclick: () => setTimeout(reveal) }, title);
  return make("nav", { "aria-label": "contents" }, ...entries.map(link));
}

function show() {
  document.title = data.runs.map((run) => run.name).join(", ");
  const groups = collect();
  const holders = { first: make("div", { id: "curves" }), second: make("div", { id: "more-curves" }) };
  const noAlgorithm = make("p", { class: "faint" }, "No algorithm acted.");
  const timeline = timelines(), profiled = profiledEvents(), files = traces();
  const middle = [
    ["step-time", "Where the time of a step goes", "Time of a step", stepTimes()],
    ["profiled", "Profiled events, algorithms and callbacks", "Profiled events", profiled],
    ["timeline", "Which algorithm acted when", "Timeline", timeline.length ? timeline : [noAlgorithm]],
  ].filter(([, , , nodes]) => nodes.length);
  const last = [
    ["configuration", "Configuration", "Configuration", configuration()], ["checkpoints", "Checkpoints", "Checkpoints", [checkpoints()]],
    ["traces", "Traces, for Perfetto", "Traces", files],
  ].filter(([, , , nodes]) => nodes.length);
  const ofGroups = (isSecond) => groups.filter((group) => group.isSecond === isSecond).map(({ id, title }) => [id, title]);
  const ofSections = (sections) => sections.map(([id, , title]) => [id, title]);
  const drawAll = () => drawCurves(groups, holders);
  const bar = controls(drawAnew, drawAll);
  root.append(make("h1", {}, data.runs.length > 1 ? `${data.runs.length} runs` : data.runs[0].name),
    contents([...ofGroups(false), ...ofSections(middle), ...ofGroups(true), ...ofSections(last)]), overview(), bar, holders.first,
    ...middle.map(([id, title, , nodes]) => section(id, title, ...nodes)), holders.second,
    ...last.map(([id, title, , nodes]) => section(id, title, ...nodes)));
  // Targets of links must not be hidden by the bar, which is fixed at the upper edge.
  new ResizeObserver(() => { document.documentElement.style.scrollPaddingTop = `${bar.offsetHeight + 8}px`; }).observe(bar);
  drawAll();
  for (const draw of wide) draw();  // only now, since their containers get a width when they are in the page
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();
  document.body.dataset.ready = "yes";
}

show();
