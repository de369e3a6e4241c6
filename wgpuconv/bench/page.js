"use strict";
// Draws the page from the value in #data. Every text of a result file goes through textContent or
// an attribute, never through HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// ---- elements ----

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const make = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- numbers ----

function digits(value, count = 3) {
  if (value === 0) return "0";
  const places = Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", {
    minimumFractionDigits: Math.min(places, 6),
    maximumFractionDigits: Math.min(places, 6),
  });
}

const NONE = "–";
const or = (form) => (value) => (value === null || value === undefined ? NONE : form(value));
const micro = or((seconds) => digits(seconds * 1e6));
const ratioText = or((value) => (value >= 10 ? digits(value) : value.toFixed(2)));
const percent = or((value) => `${(value * 100).toFixed(value < 0.0995 ? 1 : 0)} %`);
const change = or((value) => `${value >= 1 ? "+" : "−"}${Math.abs((value - 1) * 100).toFixed(1)} %`);
const power = or((value) => value.toExponential(0).replace("e-", "e−").replace("e+", "e"));

function scaled(units, step) {
  return or((value) => {
    let at = 0;
    while (value >= step && at < units.length - 1) {
      value /= step;
      at += 1;
    }
    return `${digits(value)} ${units[at]}`;
  });
}

const bytes = or((value) => (value ? scaled(["B", "KiB", "MiB", "GiB"], 1024)(value) : "0"));
const duration = or((seconds) => scaled(["µs", "ms", "s"], 1000)(seconds * 1e6));
const perSecond = (unit) => scaled(["", "k", "M", "G", "T", "P"].map((p) => `${p}${unit}/s`), 1000);

const roofText = ({ roof: [bandwidth, rate] }) =>
  `copies ${perSecond("B")(bandwidth)}, multiply-adds ${perSecond("FLOP")(rate)}`;

// ---- groups: a colour and a shape for each device or peer, filled by precision ----

const places = [...new Set(data.runs.flatMap((run) => run.groups.map((group) => group.on)))];
const placeOf = (name) => Math.max(0, places.indexOf(name.slice(0, name.lastIndexOf(" "))));
const SHAPES = [
  (r) => draw("circle", { r }),
  (r) => draw("rect", { x: -r, y: -r, width: 2 * r, height: 2 * r }),
  (r) => draw("path", { d: `M0 ${-1.3 * r}L${1.2 * r} ${0.9 * r}H${-1.2 * r}Z` }),
  (r) => draw("path", { d: `M0 ${-1.4 * r}L${1.4 * r} 0L0 ${1.4 * r}L${-1.4 * r} 0Z` }),
  (r) => draw("path", { d: `M0 ${1.3 * r}L${1.2 * r} ${-0.9 * r}H${-1.2 * r}Z` }),
];
const FILLED = { f32: 1, tf32: 0, f16: 0.4, bf16: 0.4 };
const colour = (name) => `var(--g${placeOf(name) % 10})`;

function painted(shape, name) {
  const paint = { class: "mark", fill: colour(name), stroke: colour(name), "stroke-width": 1.2,
    "fill-opacity": FILLED[name.slice(name.lastIndexOf(" ") + 1)] ?? 1 };
  return fill(shape, paint, []);
}

function mark(name, x, y, size = 4) {
  const shape = SHAPES[placeOf(name) % SHAPES.length](size);
  return painted(fill(shape, { transform: `translate(${x} ${y})` }, []), name);
}

const swatch = (name) =>
  draw("svg", { class: "swatch", viewBox: "-7 -7 14 14", "aria-hidden": "true" }, mark(name, 0, 0, 4.5));

// ---- tables ----

const sorted = new Map(); // by the table's name, how the reader sorted it

// columns: {title, key(row): what to sort by, cell(row), number, head}; rows keep their order
// until a heading is pressed, and what has no value stays last either way.
function table(name, caption, columns, rows, { rowClass = () => null, tall = false } = {}) {
  const body = make("tbody");
  const heads = columns.map((column, index) => {
    const button = make("button", { type: "button", click: () => sort(index) }, column.title);
    return make("th", { scope: "col", class: column.number ? "number" : null }, button);
  });

  function show() {
    const order = [...rows];
    const by = sorted.get(name);
    if (by) {
      const key = columns[by.index].key;
      order.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        const [noX, noY] = [x, y].map((value) => value === null || value === undefined);
        if (noX || noY) return noX - noY;
        const less = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
        return by.down ? -less : less;
      });
    }
    heads.forEach((head, index) => {
      if (by?.index === index) head.setAttribute("aria-sort", by.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(
      ...order.map((row) =>
        make(
          "tr",
          { class: rowClass(row) },
          columns.map((column) =>
            make(
              column.head ? "th" : "td",
              { scope: column.head ? "row" : null,
                class: column.number ? "number" : null },
              column.cell(row),
            ),
          ),
        ),
      ),
    );
  }

  function sort(index) {
    const by = sorted.get(name);
    sorted.set(name, { index, down: by?.index === index && !by.down });
    show();
  }

  if (sorted.get(name)?.index >= columns.length) sorted.delete(name);
  show();
  return make(
    "div",
    { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make(
      "table",
      null,
      make("caption", { class: "unseen" }, caption),
      make("thead", null, make("tr", null, heads)),
      body,
    ),
  );
}

const used = (columns, rows) =>
  columns.filter(
    (column) => !column.optional || rows.some((row) => ![null, undefined, ""].includes(column.key(row))),
  );

const judged = (value, told = true) =>
  make("span", { class: !told || value === null ? null : value < 1 ? "good" : "bad" }, ratioText(value));

// ---- state ----

const state = {
  run: data.runs.length - 1,
  dtype: "",
  measure: "ratio",
  text: "",
  hidden: new Set(),
};
const current = () => data.runs[state.run];
const visible = (name) => !state.hidden.has(name);
const relative = () => state.measure === "ratio" && current().baseline !== null;

function shownProblems() {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  return current().problems.filter((problem) => {
    const text = `${problem.label} ${problem.text}`.toLowerCase();
    return (!state.dtype || problem.dtype === state.dtype) && words.every((w) => text.includes(w));
  });
}

function shownGroups() {
  const dtypes = new Set(shownProblems().map((problem) => problem.dtype));
  const found = current().groups.filter((group) => dtypes.has(group.dtype) && visible(group.name));
  return [...new Set(found.map((group) => group.name))];
}

const bestOf = (problem, name) => problem.sides.find((side) => side.best && side.group === name);
const several = () => new Set(current().problems.map((problem) => problem.dtype)).size > 1;
const titled = (problem) => (several() ? `${problem.label} ${problem.dtype}` : problem.label);

const named = (problem) => problem.label !== problem.text;
const heading = (problem) =>
  make(named(problem) ? "b" : "span", { class: named(problem) ? null : "text", title: problem.text }, problem.label);

// ---- the parts of the page ----

function lead() {
  const run = current();
  const adapters = [...new Set(run.devices.map((device) => `${device.adapter}, driver ${device.driver}`))];
  const commit = run.commit ? `, commit ${run.commit.slice(0, 12)}` : "";
  byId("lead").replaceChildren(
    adapters.join("; ") || "no device of wgpuconv",
    make("br"),
    make(
      "span",
      { class: "dim" },
      `${run.problems.length} problems, ${run.date.slice(0, 10)}, wgpuconv ${run.wgpuconv}${commit}. Method: ${run.method}`,
    ),
  );
}

function tiles() {
  const run = current();
  const ours = run.groups.filter((group) => group.ours && group.problems && group.on !== run.baseline);
  byId("tiles").replaceChildren(
    ...ours.map((group) =>
      make(
        "div",
        { class: "tile" },
        make("span", null, swatch(group.name), group.name),
        make("b", null, `${ratioText(group.mean)} ×`),
        make(
          "span",
          { class: "dim" },
          `the time of ${run.baseline} ${group.dtype}, geometric mean of ${group.problems}. `,
          `Faster on ${group.wins}, ${group.ties === 1 ? "1 tie" : `${group.ties} ties`}, `,
          `slower on ${group.losses}; at worst ${ratioText(group.worst)} (${group.worst_at}).`,
        ),
      ),
    ),
  );
}

function standings() {
  const run = current();
  const dtypes = several();
  const isBaseline = (group) => group.on === run.baseline && group.precision === group.dtype;
  const columns = [
    { title: "on", key: (g) => g.name, cell: (g) => [swatch(g.name), g.name], head: true },
    { title: "problems", key: (g) => (dtypes ? g.dtype : null), cell: (g) => g.dtype, optional: true },
    { title: "fastest on", key: (g) => g.led, cell: (g) => `${g.led} of ${g.timed}`, number: true },
    {
      title: `ratio to ${run.baseline}`, key: (g) => g.mean, number: true, optional: true,
      cell: (g) => (isBaseline(g) ? "baseline" : judged(g.mean)),
    },
    {
      title: "worst", key: (g) => g.worst, number: true, optional: true,
      cell: (g) => (isBaseline(g) ? NONE : ratioText(g.worst)),
    },
    { title: "at", key: (g) => g.worst_at, cell: (g) => (isBaseline(g) ? NONE : g.worst_at), optional: true },
    {
      title: "faster / tie / slower", key: (g) => (g.problems ? g.wins : null), number: true, optional: true,
      cell: (g) => (g.problems && !isBaseline(g) ? `${g.wins} / ${g.ties} / ${g.losses}` : NONE),
    },
    { title: "total time", key: (g) => g.total, cell: (g) => duration(g.total), number: true, optional: true },
  ];
  byId("standings").replaceChildren(
    table("standings", "Each device and peer, by precision", used(columns, run.groups), run.groups),
  );
  byId("against").hidden = run.matrix.every((row) => row.cells.length === 0);
  const rows = run.matrix.flatMap((row) => row.cells.map((cell) => ({ ...cell, row })));
  byId("matrix").replaceChildren(
    table(
      "matrix",
      "Geometric mean of time ratios of each of our devices to each of the others",
      [
        { title: "on", key: (c) => c.row.group, cell: (c) => [swatch(c.row.group), c.row.group], head: true },
        { title: "problems", key: (c) => c.row.dtype, cell: (c) => c.row.dtype },
        { title: "against", key: (c) => c.against, cell: (c) => [swatch(c.against), c.against] },
        { title: "ratio", key: (c) => c.mean, cell: (c) => judged(c.mean), number: true },
        { title: "worst", key: (c) => c.worst, cell: (c) => ratioText(c.worst), number: true },
        { title: "at", key: (c) => c.worst_at, cell: (c) => c.worst_at },
        { title: "faster / tie / slower", key: (c) => c.wins, cell: (c) => `${c.wins} / ${c.ties} / ${c.losses}`, number: true },
      ],
      rows,
    ),
  );
}

const VERDICTS = { slower: "bad", faster: "good", same: null };

function differenceTable(name, caption, rows) {
  return table(
    name,
    caption,
    [
      { title: "problem", key: (d) => d.problem, cell: (d) => d.problem, head: true },
      { title: "side", key: (d) => `${d.on} ${d.what}`, cell: (d) => `${d.on} ${d.what}` },
      { title: "precision", key: (d) => d.precision, cell: (d) => d.precision },
      { title: "change", key: (d) => d.ratio, cell: (d) => change(d.ratio), number: true },
      {
        title: "verdict", key: (d) => d.verdict,
        cell: (d) => make("span", { class: `badge ${VERDICTS[d.verdict] ?? ""}` }, d.verdict),
      },
      { title: "before, µs", key: (d) => d.before, cell: (d) => micro(d.before), number: true },
      { title: "after, µs", key: (d) => d.after, cell: (d) => micro(d.after), number: true },
    ],
    [...rows].sort((a, b) => b.ratio - a.ratio),
    { tall: true },
  );
}

const list = (title, items, className) =>
  items.length
    ? make("details", { open: items.length <= 3 }, make("summary", { class: className }, `${title} (${items.length})`),
        make("ul", null, items.map((item) => make("li", null, item))))
    : null;

function differences() {
  byId("differences").hidden = data.differences.length === 0;
  byId("comparisons").replaceChildren(
    ...data.differences.map((found, index) =>
      make(
        "div",
        null,
        make("h3", null, `${found.before} → ${found.after}`),
        make(
          "p",
          null,
          found.ours.length
            ? `What our devices offer takes ${change(found.mean)} time in geometric mean: `
            : "Nothing of ours is in both: ",
          make("span", { class: found.slower ? "bad" : null }, `${found.slower} slower`),
          ", ",
          make("span", { class: found.faster ? "good" : null }, `${found.faster} faster`),
          `, ${found.same} the same (within the noise).`,
        ),
        list("Other things differ too", found.warnings, "bad"),
        list("No time any more", found.lost, "bad"),
        found.ours.length
          ? differenceTable(`ours${index}`, `Ours, ${found.before} to ${found.after}`, found.ours)
          : null,
        make("details", null, make("summary", null, `All ${found.sides.length} sides that both timed`),
          differenceTable(`sides${index}`, `All sides, ${found.before} to ${found.after}`, found.sides)),
        list(`Only in ${found.before}`, found.only_before),
        list(`Only in ${found.after}`, found.only_after),
      ),
    ),
  );
}

function overview(problems, groups) {
  byId("overview-note").textContent = relative()
    ? `Time over that of ${current().baseline}: below 1 is faster. Without colour where the samples do not tell.`
    : "Median time in microseconds.";
  const dtypes = [...new Set(problems.map((problem) => problem.dtype))];
  byId("overview").replaceChildren(
    ...dtypes.flatMap((dtype) => [
      dtypes.length > 1 ? make("h3", null, dtype) : null,
      overviewTable(dtype, problems.filter((problem) => problem.dtype === dtype), groups),
    ]).filter(Boolean),
  );
  if (!problems.length) nothing(byId("overview"), "No problem matches.");
}

function overviewTable(dtype, problems, groups) {
  const ratios = relative();
  const here = current().groups.filter((g) => g.dtype === dtype && groups.includes(g.name));
  const columns = [
    { title: "problem", key: (p) => p.label, head: true,
      cell: (p) => [heading(p), p.count > 1 ? ` ×${p.count}` : null] },
    { title: "GFLOP", key: (p) => p.flop, cell: (p) => digits(p.flop / 1e9), number: true },
    ...here.map(({ name, on, precision }) => ({
      title: precision === dtype ? on : name,
      key: (p) => bestOf(p, name)?.[ratios ? "ratio" : "seconds"],
      cell: (p) => {
        const side = bestOf(p, name);
        if (!side) return NONE;
        if (!ratios) return micro(side.seconds);
        return p.sides[p.baseline] === side
          ? make("span", { class: "dim" }, `${micro(side.seconds)} µs`)
          : make("span", { title: `${micro(side.seconds)} µs` }, judged(side.ratio, side.told));
      },
      number: true,
    })),
    {
      title: "fastest", key: (p) => p.leaders.map((i) => p.sides[i].on).join(" "),
      cell: (p) => [
        p.leaders.length > 1 ? make("span", { class: "badge" }, "tie") : null,
        p.leaders.map((i) => `${p.sides[i].on} ${p.sides[i].what}`).join(", ") || NONE,
      ],
    },
  ];
  return table(`overview ${dtype}`, `Each ${dtype} problem's best side by device and peer`, columns, problems);
}

// ---- pictures ----

const logTicks = (low, high) => {
  const decades = Math.log10(high / low);
  const steps = decades > 3.2 ? [1] : decades > 1.6 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)) - 1; e <= Math.ceil(Math.log10(high)); e += 1)
    for (const step of steps) {
      const tick = step * 10 ** e;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  return ticks;
};
const along = (low, high, from, to) => (value) =>
  from + ((to - from) * Math.log(value / low)) / Math.log(high / low);

function picture(node, width, height, label, children) {
  node.replaceChildren(draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, children));
}

const nothing = (node, why) => node.replaceChildren(make("p", { class: "dim" }, why));
const described = (problem, side) =>
  `${titled(problem)}, ${side.on} ${side.what} ${side.precision}: ${micro(side.seconds)} µs` +
  (side.rate ? `, ${perSecond("FLOP")(side.rate)}` : "") +
  (side.ratio === null ? "" : `, ratio ${ratioText(side.ratio)}`) +
  (side.error === null ? "" : `, error ${power(side.error)}`);

function plain(value) {
  return value >= 1e4 || value < 1e-3 ? power(value) : String(Number(value.toPrecision(2)));
}

function bars(problems, groups) {
  byId("bars-note").textContent = relative()
    ? `Time over that of ${current().baseline}, log scale: to the left of 1 is faster.`
    : "Median time in microseconds, log scale.";
  const dtypes = [...new Set(problems.map((problem) => problem.dtype))];
  byId("bars").replaceChildren(
    ...dtypes.map((dtype) =>
      make("div", null, dtypes.length > 1 ? make("h3", null, dtype) : null, make("div", { class: "chart" }))),
  );
  if (!dtypes.length) nothing(byId("bars"), "Nothing to draw.");
  dtypes.forEach((dtype, index) =>
    barChart(byId("bars").children[index].lastChild, problems.filter((p) => p.dtype === dtype), groups));
}

function barChart(node, problems, groups) {
  const ratios = relative();
  const value = (side) => (ratios ? side.ratio : side.seconds * 1e6);
  const rows = problems
    .map((problem) => ({
      problem,
      sides: groups
        .map((name) => bestOf(problem, name))
        .filter((side) => side && value(side) && !(ratios && side === problem.sides[problem.baseline])),
    }))
    .filter((row) => row.sides.length);
  if (!rows.length) return nothing(node, "Nothing to draw.");
  const values = rows.flatMap((row) => row.sides.map(value));
  const low = ratios ? Math.min(0.5, ...values) / 1.1 : 10 ** Math.floor(Math.log10(Math.min(...values)) - 0.01);
  const high = Math.max(ratios ? 2 : 0, ...values) * 1.1;
  const width = Math.max(280, node.clientWidth);
  const room = 46; // for the number behind a bar
  const x = along(low, high, ratios ? room : 2, width - room);
  const [bar, gap, top] = [9, 2, 20];
  const parts = [];
  let y = top;
  for (const { problem, sides } of rows) {
    y += 8;
    parts.push(
      draw("text", { x: 2, y: y + 10 }, draw("tspan", { class: "strong" }, clipped(problem.label, width)),
        named(problem) ? draw("tspan", { dx: 8 }, clipped(problem.text, width - 7 * problem.label.length)) : null),
    );
    y += 16;
    for (const side of sides) {
      const [from, to] = [x(ratios ? 1 : low), x(value(side))];
      const left = value(side) < 1 && ratios;
      parts.push(
        painted(draw(
          "rect",
          { x: Math.min(from, to), y, width: Math.max(1, Math.abs(to - from)), height: bar, rx: 1 },
          draw("title", null, described(problem, side)),
        ), side.group),
        draw("text", { x: left ? to - 4 : to + 4, y: y + bar - 0.5, "text-anchor": left ? "end" : "start" },
          ratios ? ratioText(value(side)) : digits(value(side))),
      );
      y += bar + gap;
    }
  }
  const grid = logTicks(low, high)
    .filter((_, index, all) => width > 480 || all.length < 7 || index % 2 === 0)
    .flatMap((tick) => [
      draw("line", { class: tick === 1 && ratios ? "one" : "grid", x1: x(tick), x2: x(tick), y1: top, y2: y + 6 }),
      draw("text", { x: x(tick), y: top - 7, "text-anchor": x(tick) < 14 ? "start" : "middle" }, plain(tick)),
    ]);
  picture(node, width, y + 8,
    `Bars of the ${ratios ? "time ratio" : "time"} of ${groups.join(", ")} on ${rows.length} problems; the table above has the numbers`,
    [grid, parts]);
}

const clipped = (text, width) => {
  const most = Math.max(1, Math.floor((width - 20) / 6.6));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
};

// points: {x, y, group, title}; lines: [{points, group, label}] in the same units
function scatter(node, label, xTitle, yTitle, points, lines = [], one = false) {
  if (!points.length) return nothing(node, "Nothing to draw.");
  const span = (values, least) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const more = Math.max(1.25, Math.sqrt(least / (high / low)));
    return [low / more, high * more];
  };
  const [x0, x1] = span(points.map((p) => p.x), 20);
  const [y0, y1] = span([...points.map((p) => p.y), ...lines.map((l) => l.top)], 20);
  const width = Math.max(280, node.clientWidth);
  const height = Math.round(Math.min(400, Math.max(280, width * 0.72)));
  const [left, right, top, bottom] = [46, width - 10, 22, height - 36];
  const [x, y] = [along(x0, x1, left, right), along(y0, y1, bottom, top)];
  const clip = `clip-${node.id}`;
  const parts = [
    logTicks(x0, x1).map((tick) => [
      draw("line", { class: tick === 1 && one ? "one" : "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom }),
      draw("text", { x: x(tick), y: bottom + 15, "text-anchor": "middle" }, plain(tick)),
    ]),
    logTicks(y0, y1).map((tick) => [
      draw("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, plain(tick)),
    ]),
    draw("text", { x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, xTitle),
    draw("text", { x: 2, y: 11 }, yTitle),
    draw("clipPath", { id: clip }, draw("rect", { x: left, y: top, width: right - left, height: bottom - top })),
    lines.map((line) =>
      draw("path", {
        d: line.path(x0, x1).map(([a, b], i) => `${i ? "L" : "M"}${x(a)} ${y(b)}`).join(""),
        fill: "none", stroke: colour(line.group), "stroke-width": 1.5, "clip-path": `url(#${clip})`,
      }, draw("title", null, line.label)),
    ),
    points.map((point) => {
      const shape = mark(point.group, x(point.x), y(point.y));
      shape.append(draw("title", null, point.title));
      return shape;
    }),
  ];
  picture(node, width, height, label, parts);
}

function chosen(problems, groups) {
  return problems.flatMap((problem) =>
    groups.map((name) => bestOf(problem, name)).filter(Boolean).map((side) => ({ problem, side })),
  );
}

function roofline(problems, groups) {
  const points = chosen(problems, groups)
    .filter(({ problem, side }) => problem.intensity && side.rate)
    .map(({ problem, side }) => ({
      x: problem.intensity, y: side.rate / 1e12, group: side.group,
      title: `${described(problem, side)}, ${digits(problem.intensity)} FLOP/byte` +
        (side.share ? `, ${percent(side.share)} of its roof` : ""),
    }));
  const lines = current().devices
    .filter((device) => device.roof)
    .map((device) => {
      const [bandwidth, rate] = device.roof.map((value) => value / 1e12);
      const ridge = rate / bandwidth;
      return {
        group: current().groups.find((group) => group.on === device.name)?.name,
        label: `${device.name}: ${roofText(device)}`,
        top: rate,
        path: (low, high) => {
          const at = (x) => [x, Math.min(rate, x * bandwidth)];
          return [at(low), ...(ridge > low && ridge < high ? [at(ridge)] : []), at(high)];
        },
      };
    })
    .filter((line) => line.group);
  scatter(byId("roofline"), `Roofline: ${points.length} points of ${groups.join(", ")}`,
    "operations a byte", "TFLOP/s", points, lines);
}

function errors(problems, groups) {
  const ratios = relative();
  byId("error-note").textContent =
    `Largest error against float64 at samples, over ${ratios ? `the time ratio to ${current().baseline}` : "the time"}: ` +
    "low and to the left is good.";
  const points = chosen(problems, groups)
    .filter(({ side }) => side.error && (!ratios || side.ratio))
    .map(({ problem, side }) => ({
      x: ratios ? side.ratio : side.seconds * 1e6, y: side.error, group: side.group,
      title: described(problem, side),
    }));
  scatter(byId("error"), `Error against time: ${points.length} points of ${groups.join(", ")}`,
    ratios ? "time ratio" : "µs", "error", points, [], ratios);
}

// ---- all sides ----

function badges(problem, side) {
  const index = problem.sides.indexOf(side);
  const tie = problem.leaders.length > 1;
  return [
    problem.leaders.includes(index) && (tie ? ["tie"] : ["fastest", "good"]),
    index === problem.baseline && ["baseline"],
    side.choice && ["choice"],
    side.prepared && ["prepared"],
    !side.same_work && ["no bias"],
    side.failure && ["failed", "bad"],
  ].filter(Boolean);
}

const notes = (problem, side) => [
  badges(problem, side).map(([text, className]) => make("span", { class: `badge ${className ?? ""}` }, text)),
  side.failure ? make("span", { class: "why" }, side.failure) : null,
];

const opened = new Set();

function sides(problem) {
  const shown = problem.sides.filter((side) => visible(side.group));
  const columns = used(
    [
      { title: "side", key: (s) => `${s.on} ${s.what}`, cell: (s) => [swatch(s.group), `${s.on} ${s.what}`], head: true },
      { title: "precision", key: (s) => s.precision, cell: (s) => s.precision },
      { title: "notes", key: (s) => badges(problem, s).map(([text]) => text).join(" "), cell: (s) => notes(problem, s) },
      { title: "time, µs", key: (s) => s.seconds, cell: (s) => micro(s.seconds), number: true },
      { title: "ratio", key: (s) => s.ratio, cell: (s) => judged(s.ratio, s.told), number: true, optional: true },
      { title: "min, µs", key: (s) => s.low, cell: (s) => micro(s.low), number: true },
      { title: "spread", key: (s) => (s.seconds ? s.seconds / s.low - 1 : null), number: true,
        cell: (s) => percent(s.seconds ? s.seconds / s.low - 1 : null) },
      { title: "samples", key: (s) => s.samples || null, cell: (s) => String(s.samples), number: true },
      { title: "TFLOP/s", key: (s) => s.rate, cell: (s) => or((v) => digits(v / 1e12))(s.rate), number: true, optional: true },
      { title: "of roof", key: (s) => s.share, cell: (s) => percent(s.share), number: true, optional: true },
      { title: "error", key: (s) => s.error, cell: (s) => power(s.error), number: true, optional: true },
      { title: "workspace", key: (s) => s.workspace, cell: (s) => bytes(s.workspace), number: true, optional: true },
      { title: "call", key: (s) => s.call, cell: (s) => duration(s.call), number: true, optional: true },
      { title: "end to end", key: (s) => s.end_to_end, cell: (s) => duration(s.end_to_end), number: true, optional: true },
      { title: "first call", key: (s) => s.first_call, cell: (s) => duration(s.first_call), number: true, optional: true },
      { title: "configuration", key: (s) => s.label, cell: (s) => make("span", { class: "text dim" }, s.label), optional: true },
    ],
    shown,
  );
  const facts = [
    `${digits(problem.flop / 1e9)} GFLOP`,
    bytes(problem.nbytes),
    problem.intensity ? `${digits(problem.intensity)} FLOP/byte` : null,
    problem.count > 1 ? `${problem.count} times in its network` : null,
  ].filter(Boolean).join(", ");
  return [
    make("p", { class: "dim" }, facts),
    problem.failure ? make("p", { class: "bad" }, problem.failure) : null,
    // One sorting for all: who wants errors first wants it on each problem.
    shown.length ? table("sides", `All sides of ${titled(problem)}`, columns, shown, { rowClass: (s) => (s.best ? "stands" : null) }) : null,
    problem.found.length
      ? make("details", null, make("summary", null, "How each choice was found"),
          make("ul", null, problem.found.map(([name, how]) => make("li", null, `${name}: ${how}`))))
      : null,
    problem.refusals.length
      ? make("details", null, make("summary", null, `Does not apply (${problem.refusals.length})`),
          make("ul", null, problem.refusals.map(([name, why]) => make("li", null, `${name}: ${why}`))))
      : null,
  ];
}

function problemList(problems) {
  byId("problems").replaceChildren(
    ...problems.map((problem) => {
      const key = `${state.run} ${problem.label} ${problem.text}`;
      const inside = make("div", { class: "inside" });
      const fillIn = () => inside.childNodes.length || inside.append(...sides(problem).filter(Boolean));
      const open = opened.has(key) || current().problems.length === 1;
      if (open) fillIn();
      return make(
        "details",
        { open, toggle: (event) => {
            if (event.target.open) { opened.add(key); fillIn(); } else opened.delete(key);
          } },
        make("summary", null, heading(problem), named(problem) ? make("span", { class: "text" }, problem.text) : null),
        inside,
      );
    }),
  );
  if (!problems.length) nothing(byId("problems"), "No problem matches.");
}

// ---- the run ----

function facts() {
  const run = current();
  const entry = (name, ...values) => [make("dt", null, name), make("dd", null, ...values)];
  byId("run").replaceChildren(
    make(
      "dl",
      { class: "words" },
      entry("file", run.name),
      entry("date", run.date),
      entry("wgpuconv", run.wgpuconv + (run.commit ? `, commit ${run.commit}` : "")),
      entry("method", run.method),
      entry("baseline", run.baseline ?? "none"),
      run.devices.map((device) =>
        entry(
          device.name,
          `${device.adapter}, driver ${device.driver}, ${device.versions}` +
            (device.roof ? `; ${roofText(device)}` : "") +
            (device.software ? "; a software driver" : ""),
        ),
      ),
      run.peers.map((peer) =>
        entry(peer.name, peer.absent
          ? make("span", { class: "dim" }, `absent: ${peer.absent}`)
          : [peer.device, peer.versions].filter(Boolean).join(", ")),
      ),
      run.machine.map(([name, value]) => entry(name.replaceAll("_", " "), value)),
    ),
  );
}

// ---- what is shown ----

function choose(id, title, options, selected, changed) {
  return make("label", null, title,
    make("select", { id, change: (event) => changed(event.target.value) },
      options.map(([value, text]) => make("option", { value, selected: value === selected }, text))));
}

function filters() {
  const run = current();
  const dtypes = [...new Set(run.problems.map((problem) => problem.dtype))];
  if (!dtypes.includes(state.dtype)) state.dtype = "";
  byId("choices").replaceChildren(
    ...[
      data.runs.length > 1
        ? choose("result", "result", data.runs.map((each, i) => [String(i), each.name]), String(state.run),
            (value) => { state.run = Number(value); all(); byId("result").focus(); })
        : null,
      dtypes.length > 1
        ? choose("dtype", "dtype", [["", "all"], ...dtypes.map((d) => [d, d])], state.dtype,
            (value) => { state.dtype = value; below(); })
        : null,
      run.baseline
        ? choose("measure", "show", [["ratio", `ratio to ${run.baseline}`], ["time", "time"]], state.measure,
            (value) => { state.measure = value; below(); })
        : null,
      make("label", null, "find",
        make("input", { id: "find", type: "search", placeholder: "problem: c4, r3, stride2", value: state.text,
          input: (event) => { state.text = event.target.value; below(); } })),
    ].filter(Boolean),
  );
  const legend = byId("groups").querySelector("legend");
  byId("groups").replaceChildren(
    legend,
    ...[...new Set(run.groups.map((group) => group.name))].map((name) =>
      make("label", null,
        make("input", { type: "checkbox", checked: visible(name), value: name,
          change: (event) => {
            if (event.target.checked) state.hidden.delete(name);
            else state.hidden.add(name);
            below();
          } }),
        swatch(name), name)),
  );
}

function pictures() {
  const [problems, groups] = [shownProblems(), shownGroups()];
  bars(problems, groups);
  roofline(problems, groups);
  errors(problems, groups);
}

function below() {
  const [problems, groups] = [shownProblems(), shownGroups()];
  overview(problems, groups);
  pictures();
  problemList(problems);
}

function all() {
  lead();
  tiles();
  standings();
  filters();
  below();
  facts();
}

byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("open-all").addEventListener("click", (event) => {
  const every = [...document.querySelectorAll("#problems > details")];
  const open = every.some((each) => !each.open);
  for (const each of every) each.open = open;
  event.target.textContent = open ? "Close all" : "Open all";
});
let drawnAt = document.documentElement.clientWidth;
addEventListener("resize", () => {
  if (document.documentElement.clientWidth !== drawnAt) {
    drawnAt = document.documentElement.clientWidth;
    pictures();
  }
});
differences();
all();
