// The page: its sections in order, and the links to them.
const nameOf = (run, index) => make("h3", {}, dot(index), run.name);

const isNoise = (key, value) => value === undefined || value === "null" || /^enabled_algorithms\/|\/needed_events$|^composer_version$/.test(key)
  || (key === "composer_commit_hash" && value === "None") || (key === "node_name" && value.startsWith("unknown because"));
// They differ between any two runs, follow from another setting, or have a column of their own.
const isTrivial = (key) => /^(run_name|environment\/(command|host)|train_dataloader\/num_batches|script\/.*|optimizer\/lr)$/.test(key);
const differs = (key) => new Set(data.runs.map((run) => run.config[key])).size > 1;
const settingKeys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));

// "metrics/eval/Accuracy" as "eval Accuracy".
const title = (metric) => metric.replace(/^metrics\/([^/]+)\//, "$1 ").replace(/^loss\/train\/total$/, "train loss");

function overview() {
  const differing = settingKeys.filter((key) => differs(key) && !isTrivial(key) && !data.runs.every((run) => isNoise(key, run.config[key])));
  const summarized = [...new Set(data.runs.flatMap((run) => Object.keys(run.summary)))];
  // Losses, metrics of evaluations, metrics of training.
  const metrics = [/^loss\//, /^metrics\/(?!train\/)/, /^metrics\/train\//].flatMap((kind) => summarized.filter((name) => kind.test(name)));
  const rate = summarized.find((name) => name.startsWith("lr-"));
  const counts = ["epoch", "batch", "sample", "token"].filter((name) => data.runs.some((run) => run.status[name]));
  // Results first: few settings fit on a phone.
  const head = ["run", "ended", ...metrics.map(title), "learning rate", ...differing.map((key) => breakable(key.replace(/^algorithms\//, ""))), ...counts.map((name) => ({ epoch: "epochs", batch: "batches" }[name] ?? `${name}s`)), "started", "took"];
  const rows = data.runs.flatMap((run, index) => {
    const row = make("tr", {}, ...cells(make("div", { title: run.name }, dot(index), short(run.name)), howEnded(run), ...metrics.map((name) => result(run.summary[name])),
      learningRate(run, rate), ...differing.map((key) => brieflySet(run.config[key] ?? "–")), ...counts.map((name) => run.status[name] ?? 0),
      String(run.status.started ?? "").slice(0, 16).replace("T", " "), duration(run.status)));
    return run.status.error ? [row, make("tr", {}, make("td", { colspan: head.length }, failure(run.status.error)))] : [row];
  });
  return make("div", { class: "overview", tabindex: 0 }, table(head, rows));
}

function howEnded(run) {
  const status = run.status.status ?? "unknown";
  // A killed run still has the status "running", so the time of its last update is shown.
  const seen = status === "running" ? `, seen last ${String(run.status.updated).slice(0, 19).replace("T", " ")} UTC` : "";
  const lines = [run.status.reason, run.num_bad_lines ? `${run.num_bad_lines} line(s) of the metrics are cut off` : ""].filter(Boolean);
  return make("div", {}, make("span", { class: status }, status + seen), ...lines.map((line) => make("div", { class: "faint" }, line)));
}

// The last value of a metric, and the best one with its time.
function result(summary) {
  if (!summary) return "–";
  const { last, best } = summary;
  const where = best && `best ${brief(best.value)} at batch ${best.batch.toLocaleString("en")}`;
  return make("div", { class: "result" }, make("b", {}, brief(last.value)), best ? make("div", { class: "faint", title: `epoch ${best.epoch}` }, where) : null);
}

// A setting as text: numbers without rounding errors such as 0.30000000000000004, long values cut off.
function brieflySet(text) {
  const number = text.length > 12 && text.includes(".") ? Number(text) : NaN;
  return make("span", { title: text }, Number.isFinite(number) ? String(Number(number.toPrecision(8))) : short(text));
}

function learningRate(run, name) {
  const first = run.config["optimizer/lr"], last = run.summary[name]?.last;
  return make("div", { class: "result" }, first === undefined ? make("span", {}, last ? brief(last.value) : "–") : brieflySet(first),
    first !== undefined && last ? make("div", { class: "faint" }, `last ${brief(last.value)}`) : null);
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
  return make("div", { class: "controls" }, make("label", {}, "over", axis), make("label", {}, "smoothing of training", smoothing),
    make("label", {}, log, "logarithmic"), make("label", {}, "only", filter), data.runs.length > 1 ? legend(onView) : null);
}

// The names of the runs: each can be hidden, and stands out in the charts while it is pointed at.
function legend(onView) {
  const boxes = data.runs.map((_, index) => make("input", { type: "checkbox", checked: true, "data-run": index, onchange: () => apply() }));
  const apply = () => {
    boxes.forEach((box, index) => view.hidden[box.checked ? "delete" : "add"](index));
    onView();
  };
  const all = (checked) => { for (const box of boxes) box.checked = checked; apply(); };
  const highlight = (index) => {
    for (const curve of document.querySelectorAll(".chart [data-run]")) curve.classList.toggle("dim", index !== null && curve.dataset.run !== String(index));
  };
  const labels = boxes.map((box, index) => make("label", { title: data.runs[index].name, onpointerenter: () => highlight(index), onpointerleave: () => highlight(null) },
    box, dot(index), make("span", { class: "name" }, data.runs[index].name)));
  const button = (text, checked) => make("button", { onclick: () => all(checked) }, text);
  return make("div", { class: "runs", role: "group", "aria-label": "runs" }, button("all", true), button("none", false), ...labels);
}

// A bar for each run and a table with the share and the seconds of each part.
function shares(id, parts, timesOf) {
  const seconds = (run, part) => timesOf(run)[part] ?? 0;
  const total = (run) => Object.values(timesOf(run)).reduce((sum, each) => sum + each, 0);
  const share = (run, part) => (total(run) ? (100 * seconds(run, part)) / total(run) : 0);
  const bar = (run) => make("div", { class: "bar" }, ...parts.map((part, index) =>
    make("div", { style: `width:${share(run, part)}%;background:${colorOf(index)}`, title: `${part}: ${share(run, part).toFixed(1)} %` })));
  const bars = data.runs.map((run, index) => make("div", { class: "bar-row" }, data.runs.length > 1 ? make("div", {}, dot(index), short(run.name)) : null, bar(run)));
  const rows = parts.map((part, index) => make("tr", {}, ...cells(make("div", { class: "part" }, dot(index), part),
    ...data.runs.map((run) => make("span", { class: "part" }, `${share(run, part).toFixed(1)} %`, make("span", { class: "faint" }, ` ${seconds(run, part).toFixed(2)} s`))))));
  return make("div", { class: "wide", id }, ...bars,
    make("div", { class: "scroll", tabindex: 0 }, table(["part", ...data.runs.map((run) => run.name)], rows)));
}

function stepTimes() {
  const timesOf = (run) => run.times.step ?? {};
  const parts = [...new Set(data.runs.flatMap((run) => Object.keys(timesOf(run))))];
  if (!parts.length) return [make("p", { class: "faint" }, "No times were recorded.")];
  const note = make("p", { class: "faint" }, "Measured by the host's clock, which counts a device's time where the host waits for it. "
    + "Each part includes the algorithms and callbacks of the event that ends it: "
    + "waiting for data those of batch_start, preparing the batch those of before_forward, forward those of after_forward, "
    + "loss those of after_loss, backward those of after_backward, after backward those of after_train_batch. "
    + "Optimizer is its step; callbacks are those of batch_end, with the metrics, the logging and the schedulers before them.");
  return [shares("step-times", parts, timesOf), note];
}

// Where the time of the runs went, over all attempts, and the time of their ranks.
function goodput() {
  if (!data.runs.some((run) => run.goodput)) return [];
  const timesOf = (run) => run.goodput?.seconds ?? {};
  const parts = [...new Set(data.runs.flatMap((run) => Object.keys(timesOf(run))))].filter((part) => data.runs.some((run) => timesOf(run)[part] > 0));
  const lines = data.runs.flatMap((run, index) => {
    if (!run.goodput) return [];
    const { share, total_s: total, num_attempts: attempts, num_launches: launches, between_launches_s: between, lost_batches: lost } = run.goodput;
    const more = [attempts > 1 ? `${attempts} attempts` : "", lost ? `${lost.toLocaleString("en")} batches trained again` : "",
      launches > 1 ? `not running for ${elapsed(between)} between ${launches} launches, which does not count` : ""].filter(Boolean);
    return [make("p", {}, data.runs.length > 1 ? dot(index) : null, data.runs.length > 1 ? `${short(run.name)}: ` : null,
      make("b", {}, `${(100 * share).toFixed(1)} %`), ` of ${elapsed(total)} trained`, ...more.map((text) => `; ${text}`))];
  });
  const note = make("p", { class: "faint" }, "Measured by the host's clock of rank 0, from the start of the processes. "
    + "Training is forward, loss, backward and the optimizer's step, with the waits for other ranks in them.");
  return [...lines, shares("goodput-shares", parts, timesOf), note, ...ranksOfRuns()];
}

function ranksOfRuns() {
  const names = { train: "forward and loss", backward: "backward, with waits for other ranks", collective: "waits for other ranks elsewhere", checkpoint: "checkpoints" };
  const milliseconds = (seconds) => make("span", { class: "part" }, `${exact(1000 * seconds, 3)} ms`);
  return data.runs.flatMap((run, index) => {
    const { ranks = {}, stragglers = [], num_compared: compared = 0, world_size: size = 0 } = run.goodput ?? {};
    if (compared < 2 || !Object.keys(ranks).length) return [];
    const rows = Object.entries(ranks).map(([part, { min, median, max, slowest_rank: slowest }]) =>
      make("tr", {}, ...cells(names[part] ?? part, milliseconds(min), milliseconds(median), milliseconds(max), String(slowest))));
    const told = stragglers.map((each) => make("p", { class: "bad" }, `Rank ${each.rank} (${each.host}) was slow at batch ${each.batch.toLocaleString("en")}: `
      + `${names[each.cause] ?? each.cause} took ${exact(1000 * each.seconds, 3)} ms of each of its batches, ${exact(1000 * each.others, 3)} ms on the other ranks.`));
    const title = size > compared ? `Time per batch of ${compared} of ${size} ranks, those of rank 0's node` : `Time per batch of ${compared} ranks`;
    return [make("h3", {}, data.runs.length > 1 ? dot(index) : null, data.runs.length > 1 ? `${run.name}: ` : null, title), ...told,
      make("div", { class: "wide ranks" }, table(["part", "least", "median", "most", "on rank"], rows))];
  });
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
    const end = 1 + Math.max(...names.flatMap((name) => run.acting[name].batches.map(([, last]) => last)));
    const rows = names.map((name) => {
      const { count, batches } = run.acting[name];
      const marks = batches.map(([first, last]) => svg("rect", { x: first, width: last - first + 1, height: 1, style: `fill:${colorOf(index)}` }));
      const where = batches.length > 3 ? `${batches.length} ranges` : batches.map(([first, last]) => (first === last ? `batch ${first}` : `batches ${first} to ${last}`)).join(", ");
      return make("div", { class: "acting" }, make("div", {}, name, make("span", { class: "faint" }, ` ${count.toLocaleString("en")} ${count === 1 ? "time" : "times"}: ${where}`)),
        svg("svg", { viewBox: `0 0 ${end} 1`, preserveAspectRatio: "none" }, ...marks));
    });
    return [nameOf(run, index), make("div", { class: "wide" }, ...rows, make("div", { class: "faint acting" }, `batches 0 to ${end - 1}`))];
  });
}

const settingGroups = [
  ["Model", /^(model|load_path|load_|compile)/], ["Data", /^(train_dataloader|eval_dataloader|evaluators|spin_dataloaders)/], ["Optimizer", /^optimizer/],
  ["Learning rate schedule", /^(scheduler|scale_schedule|step_schedulers)/], ["Algorithms", /^(algorithm|enabled_algorithms)/],
  ["Callbacks and loggers", /^(callbacks|loggers|progress_bar|log_|console_)/],
  ["Parallelism and precision", /^(parallelism|precision|num_nodes|num_\w+_per_node|deepspeed|fsdp|ddp_|dist_|device)/],
  ["Training", /^(max_duration|run_name|rank_zero_seed|seed|deterministic|eval_|save_|autoresume|train_subset|grad_accum|accumulate)/],
  ["Script and code", /^script\//], ["Environment", /^(environment|composer_|node_name)/], ["Other settings", /^/],
];
const settingGroup = (key) => settingGroups.findIndex(([, pattern]) => pattern.test(key));
const settingText = (key, value) => (value === undefined ? "–" : /(^|\/)num_\w+$/.test(key) && /^\d{5,}$/.test(value) ? Number(value).toLocaleString("en") : value);

function configuration() {
  const holder = make("div", { class: "scroll settings", tabindex: 0 });
  const only = make("input", { type: "checkbox", id: "differences", onchange: () => fill() });
  const search = make("input", { type: "search", id: "settings", placeholder: "part of a setting or value", oninput: () => fill() });
  const found = (key) => {
    const text = search.value.toLowerCase();
    if (only.checked && !differs(key)) return false;
    // What is not shown otherwise can be searched for.
    if (!text) return data.runs.some((run) => !isNoise(key, run.config[key]));
    return [key, ...data.runs.map((run) => run.config[key] ?? "")].some((each) => each.toLowerCase().includes(text));
  };
  const fill = () => {
    const rows = settingGroups.flatMap(([name], group) => {
      const keys = settingKeys.filter((key) => settingGroup(key) === group && found(key));
      const head = make("tr", { class: "group" }, make("th", { colspan: data.runs.length + 1, scope: "rowgroup" }, name));
      return keys.length ? [head, ...keys.map((key) => make("tr", data.runs.length > 1 && differs(key) ? { class: "differs" } : {},
        ...cells(breakable(key), ...data.runs.map((run) => settingText(key, run.config[key])))))] : [];
    });
    holder.replaceChildren(rows.length ? table(["setting", ...data.runs.map((run) => run.name)], rows) : make("p", { class: "faint" }, "No setting is like that."));
  };
  fill();
  return [make("div", { class: "controls still" }, make("label", {}, "search", search),
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

function section(id, title, nodes) {
  return make("section", { id }, make("h2", {}, title), ...nodes);
}

function folded(id, title, nodes) {
  return make("details", { id }, make("summary", {}, make("h2", {}, title)), ...nodes);
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
  const timeline = timelines(), profiled = profiledEvents(), files = traces();
  const middle = [
    ["goodput", "Goodput", "Goodput", goodput()],
    ["step-time", "Where the time of a step goes", "Time of a step", stepTimes()],
    ["profiled", "Profiled events, algorithms and callbacks", "Profiled events", profiled],
    ["timeline", "Which algorithm acted when", "Timeline", timeline],
  ].filter(([, , , nodes]) => nodes.length);
  const last = [
    ["configuration", "Settings", "Settings", configuration()], ["checkpoints", "Checkpoints", "Checkpoints", [checkpoints()]],
    ["traces", "Traces, for Perfetto", "Traces", files],
  ].filter(([, , , nodes]) => nodes.length);
  const ofGroups = (isSecond) => groups.filter((group) => group.isSecond === isSecond).map(({ id, title }) => [id, title]);
  const ofSections = (sections) => sections.map(([id, , title]) => [id, title]);
  const drawAll = () => drawCurves(groups, holders);
  const bar = controls(drawAnew, drawAll);
  root.append(make("h1", {}, data.runs.length > 1 ? `${data.runs.length} runs` : data.runs[0].name),
    contents([...ofGroups(false), ...ofSections(middle), ...ofGroups(true), ...ofSections(last)]), overview(), bar, holders.first,
    ...middle.map(([id, title, , nodes]) => (id === "timeline" ? folded : section)(id, title, nodes)), holders.second,
    ...last.map(([id, title, , nodes]) => section(id, title, nodes)));
  // Targets of links must not be hidden by the bar, which is fixed at the upper edge.
  new ResizeObserver(() => { document.documentElement.style.scrollPaddingTop = getComputedStyle(bar).position === "sticky" ? `${bar.offsetHeight + 8}px` : "8px"; }).observe(bar);
  drawAll();
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();
  document.body.dataset.ready = "yes";
}

show();
