"use strict";
// Drawing. Whatever the API says becomes a text node or an attribute's value, never markup.

const SVG = "http://www.w3.org/2000/svg";
const PERCENTILES = ["p50", "p95", "p99"];
const LABEL_GAPS = [60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600];
const HEIGHT = 230;
const MARGIN = { top: 10, right: 4, bottom: 24, left: 52 };

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/**
 * A table; the first cell of a row is its header. A cell is text or a node, a column `{ name, number }`: its name is
 * text, or nodes.
 */
function table(caption, columns, rows, foot = null) {
  const cell = (value, index, head) => {
    const kind = columns[index].number ? "number" : "name";
    return element(head ? "th" : "td", head ? { scope: head, class: kind } : { class: kind }, value);
  };
  const row = (cells) =>
    element("tr", {}, ...cells.map((value, index) => cell(value, index, index === 0 ? "row" : "")));
  const made = element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...columns.map((column, index) => cell(column.name, index, "col")))),
    element("tbody", {}, ...rows.map(row)),
  );
  if (foot !== null) made.append(element("tfoot", {}, row(foot)));
  return made;
}

/** Round steps of an axis from 0 that reach `most`. */
function ticks(most, count = 4) {
  if (!(most > 0)) return [0];
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  return Array.from({ length: Math.ceil((most / step) * 0.999) + 1 }, (_, index) => index * step);
}

/**
 * Stacked bars in `host`, with a legend and the same figures as a table.
 * `layers` are `{ name, color, values }`, a value for each of `starts`; `exact` gives the text of a layer's figure at a
 * place, or of all layers' where the layer is null; `empty` is said where there is nothing.
 */
function stackedBars(host, { title, starts, step, layers, round, exact, empty }) {
  const sums = starts.map((_, place) => layers.reduce((sum, layer) => sum + layer.values[place], 0));
  if (!sums.some((sum) => sum > 0)) {
    host.replaceChildren(element("p", { class: "hint" }, empty));
    return;
  }
  const width = Math.max(host.clientWidth, 280);
  const inner = width - MARGIN.left - MARGIN.right;
  const tall = HEIGHT - MARGIN.top - MARGIN.bottom;
  const marks = ticks(Math.max(...sums));
  const top = marks[marks.length - 1];
  const slot = inner / starts.length;
  const x = (place) => MARGIN.left + place * slot;
  const y = (value) => MARGIN.top + tall * (1 - value / top);
  const first = moment(starts[0], step, true);
  const last = moment(starts[starts.length - 1], step, true);
  const svg = shape(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      height: HEIGHT,
      role: "img",
      tabindex: 0,
      "aria-label": `${title}, ${first} to ${last}`,
    },
    shape("desc", {}, "Left and right arrows walk through the bars; the table below has the same figures."),
  );
  for (const mark of marks) {
    svg.append(
      shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(mark), y2: y(mark) }),
      shape("text", { x: MARGIN.left - 8, y: y(mark) + 4, "text-anchor": "end" }, round(mark)),
    );
  }
  const gap = slot > 5 ? Math.min(slot * 0.22, 8) : 0;
  const marked = shape("rect", { class: "marked", y: MARGIN.top, width: slot, height: tall, visibility: "hidden" });
  svg.append(marked, ...timeLabels(starts, step, slot, x));
  starts.forEach((_, place) => {
    let below = 0;
    for (const layer of layers) {
      const value = layer.values[place];
      if (!(value > 0)) continue;
      const high = y(below) - y(below + value);
      const box = { x: x(place) + gap / 2, y: y(below + value), width: slot - gap, height: Math.max(high, 0.75) };
      svg.append(shape("rect", { class: layer.color, ...box }));
      below += value;
    }
  });
  const tip = element("div", { class: "tip", role: "status", hidden: "" });
  const plot = element("div", { class: "plot" }, svg, tip);
  host.replaceChildren(plot, legend(layers), figures(title, starts, step, layers, sums, exact));
  walk({ svg, tip, marked, plot, starts, x, slot, width }, (place) => tipLines(place, starts, step, layers, exact));
}

/** Labels far enough apart, at times that are round. */
function timeLabels(starts, step, slot, x) {
  const gap = LABEL_GAPS.find((seconds) => seconds >= step && (seconds / step) * slot >= 58) ?? LABEL_GAPS.at(-1);
  return starts.flatMap((start, place) => {
    if (start % gap !== 0 || x(place) + 46 > x(starts.length)) return [];
    const [shift, anchor] = slot > 40 ? [slot / 2, "middle"] : [0, "start"];
    const words = moment(start, step, false);
    return [shape("text", { x: x(place) + shift, y: HEIGHT - 6, "text-anchor": anchor }, words)];
  });
}

function swatch(color) {
  return element("span", { class: `swatch ${color}`, "aria-hidden": "true" });
}

function legend(layers) {
  return element(
    "ul",
    { class: "legend" },
    ...layers.map((layer) => element("li", {}, swatch(layer.color), layer.name)),
  );
}

function tipLines(place, starts, step, layers, exact) {
  const line = (name, value) => element("p", {}, name, element("strong", {}, value));
  const said = layers.filter((layer) => layer.values[place] > 0);
  return [
    element("p", { class: "when" }, moment(starts[place], step, true)),
    ...said.map((layer) => line(element("span", {}, swatch(layer.color), layer.name), exact(layer, place))),
    ...(said.length === 1 ? [] : [line(element("span", {}, "All"), exact(null, place))]),
  ];
}

/** Pointer and arrow keys choose a bar, whose figures are shown beside it. */
function walk({ svg, tip, marked, plot, starts, x, slot, width }, lines) {
  let chosen = -1;
  const choose = (place) => {
    chosen = Math.max(-1, Math.min(starts.length - 1, place));
    tip.hidden = chosen < 0;
    marked.setAttribute("visibility", chosen < 0 ? "hidden" : "visible");
    if (chosen < 0) return;
    marked.setAttribute("x", String(x(chosen)));
    tip.replaceChildren(...lines(chosen));
    const scale = plot.clientWidth / width;
    const left = (x(chosen) + slot + 8) * scale;
    const fits = left + tip.offsetWidth <= plot.clientWidth;
    tip.style.left = `${fits ? left : Math.max(0, (x(chosen) - 8) * scale - tip.offsetWidth)}px`;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = Math.floor((((event.clientX - box.left) / box.width) * width - x(0)) / slot);
    choose(place >= 0 && place < starts.length ? place : -1);
  });
  svg.addEventListener("pointerleave", () => choose(-1));
  svg.addEventListener("blur", () => choose(-1));
  svg.addEventListener("keydown", (event) => {
    const target = {
      ArrowLeft: chosen < 0 ? starts.length - 1 : Math.max(0, chosen - 1),
      ArrowRight: chosen + 1,
      Escape: -1,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    choose(target);
  });
}

function figures(title, starts, step, layers, sums, exact) {
  const columns = [
    { name: "From" },
    ...layers.map((layer) => ({ name: layer.name, number: true })),
    { name: "All", number: true },
  ];
  const rows = starts.flatMap((start, place) =>
    sums[place] > 0
      ? [[moment(start, step, true), ...layers.map((layer) => exact(layer, place)), exact(null, place)]]
      : [],
  );
  return element(
    "details",
    {},
    element("summary", {}, "The figures as a table"),
    element("div", { class: "scroll" }, table(title, columns, rows)),
  );
}

/** How much of a limit is used, as a bar. */
function meter(used, limit, name) {
  const share = limit > 0 ? Math.min(1, Math.max(0, used / limit)) : 1;
  const level = share >= 0.9 ? "bad" : share >= 0.75 ? "warn" : "";
  const percent = Math.round(share * 100);
  const inner = element("span");
  inner.style.width = `${percent}%`;
  return element(
    "span",
    {
      class: `bar ${level}`,
      role: "meter",
      "aria-label": name,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": percent,
      title: `${percent} % used`,
    },
    inner,
  );
}

/** Three percentiles on one line from 0 to `most`. */
function ladder(percentiles, most) {
  const at = (value) => 5 + (170 * value) / most;
  const line = shape("svg", { class: "ladder", viewBox: "0 0 180 16", "aria-hidden": "true" });
  const points = PERCENTILES.filter((name) => typeof percentiles?.[name] === "number");
  if (points.length === 0 || !(most > 0)) return line;
  const ends = points.map((name) => at(percentiles[name]));
  line.append(shape("line", { x1: Math.min(...ends), x2: Math.max(...ends), y1: 8, y2: 8 }));
  for (const name of points.reverse())
    line.append(shape("circle", { class: name, cx: at(percentiles[name]), cy: 8, r: 4.5 }));
  return line;
}
