// Helpers of all parts of the page: the data, DOM nodes, tables and formatted numbers.
const data = JSON.parse(document.getElementById("composer-data").textContent);
const root = document.getElementById("report");
const numColors = 20;
const colorOf = (index) => `var(--run-${index % numColors})`;

// Undo the packing of the curves: positions are stored once for all curves of a run, as differences.
const summed = (differences) => {
  let sum = 0;
  return differences.map((difference) => (sum += difference));
};
for (const run of data.runs) {
  const columns = Object.entries(run.positions).map(([axis, differences]) => [axis, summed(differences)]);
  for (const curve of Object.values(run.curves)) {
    const rows = summed(curve.at);
    for (const [axis, column] of columns) curve[axis] = rows.map((row) => column[row] / (axis === "time_s" ? 1000 : 1));
  }
}

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
  value instanceof Node ? value : typeof value === "number" ? value.toLocaleString("en") : String(value ?? "")));
// A number with a few significant digits, or all digits before its point.
const exact = (value, digits = 6) => {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential(digits - 2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
};
// As `exact`, with as many digits for each number of a column.
const brief = (value) => (typeof value !== "number" ? value
  : Number.isInteger(value) || Math.abs(value) < 1e-4 || Math.abs(value) >= 1e4 ? exact(value, 4)
    : value.toLocaleString("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4 }));
// A name that may be broken after its slashes and underscores.
const breakable = (name) => make("span", {}, ...name.split(/(?<=[/_])/).flatMap((part, index) => (index ? [make("wbr"), part] : [part])));
const bytes = (size) => {
  if (size === null) return "";
  const power = size ? Math.min(4, Math.floor(Math.log2(size) / 10)) : 0;
  return `${(size / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};
const elapsed = (seconds) => {
  const [days, ...parts] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  return (days ? `${days} d ` : "") + parts.map((part) => String(part).padStart(2, "0")).join(":");
};
const duration = (status) => {
  const seconds = Math.floor((Date.parse(status.updated) - Date.parse(status.started)) / 1000);
  return Number.isFinite(seconds) ? elapsed(seconds) : "";
};
const short = (name) => (name.length > 40 ? `${name.slice(0, 39)}…` : name);
const dot = (index) => make("span", { class: "dot", style: `background:${colorOf(index)}` });

// Table sorted by the selected column: numbers descending, names ascending; selecting it again reverses the order.
function sortable(columns, records, chosen) {
  const body = make("tbody", {});
  const heads = columns.map(({ title, key, isText }) => make("th", {}, make("button", { onclick: () => sort(key, isText) }, title)));
  const sort = (key, isText = false) => {
    const side = chosen.key === key ? -chosen.side : 1;
    chosen = { key, side };
    const ordered = [...records].sort((a, b) => {
      if (isText) return side * String(a[key]).localeCompare(String(b[key]));
      if (a[key] === b[key]) return 0;
      if (a[key] === null || b[key] === null) return a[key] === null ? 1 : -1;
      return side * (b[key] - a[key]);
    });
    body.replaceChildren(...ordered.map((record) => make("tr", {}, ...columns.map(({ key: of, isText: isName, show = String }) =>
      make("td", isName ? {} : { class: "number" }, record[of] === null ? "–" : show(record[of]))))));
    columns.forEach(({ key: of, isText: isName }, place) => {
      const isUp = (side === 1) === Boolean(isName);
      if (of === key) heads[place].setAttribute("aria-sort", isUp ? "ascending" : "descending");
      else heads[place].removeAttribute("aria-sort");
    });
  };
  // `sort` reverses the order if the key is already chosen.
  const first = chosen.key;
  chosen = {};
  sort(first);
  return make("table", { class: "sortable" }, make("thead", {}, make("tr", {}, ...heads)), body);
}
