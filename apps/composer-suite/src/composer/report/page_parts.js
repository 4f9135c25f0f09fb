// Helpers of all parts of the page: the data, DOM nodes, tables and formatted numbers.
const data = JSON.parse(document.getElementById("composer-data").textContent);
const root = document.getElementById("report");
const colors = [
  "#3366cc", "#dc5a2b", "#109618", "#990099", "#0099c6", "#b8860b", "#dd4477", "#66aa00", "#b82e2e", "#5a6472",
  "#8c6d31", "#17807e", "#e6550d", "#6b6ecf", "#9c2c77", "#4a7c00", "#c9971c", "#1b4f9c", "#a55194", "#00a676",
];
const colorOf = (index) => colors[index % colors.length];

// Names are untrusted. DOM nodes treat them as text, but Plotly interprets some HTML tags, which are escaped here.
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
  value instanceof Node ? value : typeof value === "number" ? value.toLocaleString("en") : String(value ?? "")));
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
  margin: { l: 56, r: 14, t: 26, b: 44 }, height: 270, font: { size: 11 }, hovermode: "x unified", hoverlabel: { namelength: 40 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
  legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal" }, ...more,
});
const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
const bars = { hovermode: "closest", yaxis: { autorange: "reversed", automargin: true, ticks: "outside", ticklen: 4, tickcolor: "#fff" } };
const short = (name) => plain(name.length > 40 ? `${name.slice(0, 39)}…` : name);

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
