"use strict";
// The page's state and what it does. The key lives in this tab's session storage, the choices in the address.

const KEY = "admin-key";
const REFRESHES = { 15: "every 15 s", 60: "every minute", 300: "every 5 minutes", 0: "never" };
const LAYERS = 7;
const NOTHING = "Nothing in this time.";
const UNNAMED = { model: "no model", key: "no key", owner: "no owner", team: "no team" };
const LIMIT_NAMES = {
  requests_per_minute: "Requests per minute",
  tokens_per_minute: "Tokens per minute",
  parallel_requests: "Requests at a time",
  tokens_per_day: "Tokens per day",
  tokens_per_month: "Tokens per month",
  nanos_per_day: "Spend per day",
  nanos_per_month: "Spend per month",
};

const at = (id) => document.getElementById(id);
const choices = { range: "24h", width: "1h", group: "model", refresh: "60" };
let shown = null;
let asking = null;
let timer = null;
let overdue = false;
/** A name keeps its colour while the page is open. */
const colors = new Map();

function readChoices() {
  const told = new URLSearchParams(location.hash.slice(1));
  const known = { range: RANGES, group: GROUPS, refresh: REFRESHES, width: WIDTHS };
  for (const [name, options] of Object.entries(known)) {
    const value = told.get(name);
    if (value !== null && Object.hasOwn(options, value)) choices[name] = value;
  }
  const { widths } = RANGES[choices.range];
  if (!widths.includes(choices.width)) choices.width = widths[0];
}

function fillControls() {
  const options = (entries, value) =>
    entries.map(([id, name]) => element("option", id === value ? { value: id, selected: "" } : { value: id }, name));
  const named = (of) => Object.entries(of).map(([id, { name }]) => [id, name]);
  at("range").replaceChildren(...options(named(RANGES), choices.range));
  at("width").replaceChildren(
    ...options(
      RANGES[choices.range].widths.map((id) => [id, WIDTHS[id].name]),
      choices.width,
    ),
  );
  at("group").replaceChildren(...options(named(GROUPS), choices.group));
  at("refresh").replaceChildren(...options(Object.entries(REFRESHES), choices.refresh));
}

function chosen(event) {
  const { id, value } = event.target;
  choices[id] = value;
  if (id === "range") [choices.width] = RANGES[value].widths;
  history.replaceState(null, "", `#${new URLSearchParams(choices)}`);
  fillControls();
  if (id === "refresh") schedule();
  else load();
}

function complain(message) {
  at("problem").textContent = message;
  at("problem").hidden = message === "";
}

function signIn(message = "") {
  asking?.abort();
  clearTimeout(timer);
  overdue = false;
  sessionStorage.removeItem(KEY);
  shown = null;
  for (const id of ["split", "latency", "limits", "spend-chart", "tokens-chart"]) at(id).replaceChildren();
  at("updated").textContent = "";
  at("board").hidden = true;
  at("forget").hidden = true;
  at("sign-in").hidden = false;
  complain(message);
  at("key").value = "";
  at("key").focus();
}

function signedIn(event) {
  event.preventDefault();
  const key = at("key").value.trim();
  if (!/^[\x21-\x7e]{1,512}$/.test(key)) {
    complain("A key is at most 512 letters, digits and signs, without spaces.");
    return;
  }
  at("key").value = "";
  sessionStorage.setItem(KEY, key);
  open();
}

function open() {
  at("sign-in").hidden = true;
  at("board").hidden = false;
  at("forget").hidden = false;
  load();
}

/** Ask for everything once; a panel whose part fails says so, and the others are drawn. */
async function load() {
  asking?.abort();
  clearTimeout(timer);
  overdue = false;
  const mine = new AbortController();
  asking = mine;
  const key = sessionStorage.getItem(KEY) ?? "";
  const frame = timeframe(choices.range, choices.width, Date.now() / 1000);
  const group = GROUPS[choices.group];
  const span = { start_time: frame.start, end_time: frame.end };
  const paged = { ...span, bucket_width: choices.width, limit: WIDTHS[choices.width].page };
  const pages = (path, field) => askPages(path, { ...paged, "group_by[]": field }, key, mine.signal);
  at("board").classList.add("busy");
  const [usage, costs, latency, limits] = await Promise.allSettled([
    pages("v1/organization/usage/completions", group.field),
    pages("v1/organization/costs", group.costField),
    ask("v1/organization/latency", { ...span, "group_by[]": "model" }, key, mine.signal),
    ask("v1/organization/limits", {}, key, mine.signal),
  ]);
  if (mine.signal.aborted) return;
  at("board").classList.remove("busy");
  const refused = [usage, costs, limits].find(({ reason }) => reason?.status === 401 || reason?.status === 403);
  if (refused !== undefined) {
    signIn(refused.reason.message);
    return;
  }
  const failed = [usage, costs].find(({ status }) => status === "rejected");
  complain(failed === undefined ? "" : wording(failed.reason));
  if (failed === undefined) attempt("split", () => takeUsage(frame, group, usage.value, costs.value));
  panel("latency", latency, drawLatency);
  panel("limits", limits, drawLimits);
  schedule();
}

function wording(error) {
  return error instanceof ApiError ? error.message : `The answer is not what this page understands: ${error.message}`;
}

function attempt(id, draw) {
  try {
    draw();
  } catch (error) {
    at(id).replaceChildren(element("p", { class: "trouble" }, wording(error)));
  }
}

function panel(id, { status, reason, value }, draw) {
  attempt(id, () => {
    if (status === "rejected") throw reason;
    at(id).replaceChildren(draw(value));
  });
}

function schedule() {
  clearTimeout(timer);
  const seconds = Number(choices.refresh);
  if (seconds > 0 && sessionStorage.getItem(KEY) !== null) timer = setTimeout(refresh, seconds * 1000);
}

/** A tab nobody looks at asks for nothing; it catches up when it is looked at again. */
function refresh() {
  overdue = document.hidden;
  if (!overdue) load();
}

function lookedAt() {
  if (overdue && !document.hidden) load();
}

function takeUsage(frame, group, usage, costs) {
  const nameOf = (result) =>
    result[result.object === "organization.costs.result" ? group.costField : group.field] ?? null;
  const series = seriesOf([...usage, ...costs], nameOf);
  const starts = [];
  for (let start = frame.start; start < frame.end; start += frame.step) starts.push(start);
  shown = { starts, step: frame.step, series, group: choices.group };
  at("updated").textContent = `As of ${new Date().toISOString().slice(11, 19)}`;
  drawUsage();
}

function drawUsage() {
  if (shown === null) return;
  const { starts, step, series } = shown;
  const total = emptyFigures();
  for (const one of series) addFigures(total, one.total);
  drawTiles(total);
  const layers = layersOf(series);
  const dollars = (figures) => Number(figures.nanos) / 1e9;
  const tokens = (figures) => figures.input + figures.output;
  const free = total.requests > 0 ? "No spend: the models that answered have no price." : NOTHING;
  const chart = (id, title, value, round, exact, empty) =>
    stackedBars(at(id), {
      title,
      starts,
      step,
      round,
      empty,
      layers: layers.map((layer) => ({ ...layer, values: starts.map((start) => value(layer.at(start))) })),
      exact: (layer, place) => exact((layer ?? { at: whole(layers) }).at(starts[place])),
    });
  const by = GROUPS[shown.group].words;
  chart(
    "spend-chart",
    `Spend over time by ${by}`,
    dollars,
    roundDollars,
    (figures) => exactDollars(figures.nanos),
    free,
  );
  chart(
    "tokens-chart",
    `Tokens over time by ${by}`,
    tokens,
    (n) => COMPACT.format(n),
    (figures) => COUNT.format(tokens(figures)),
    NOTHING,
  );
  at("split-title").textContent = `By ${by}`;
  at("split").replaceChildren(splitTable(by, series, total));
}

function drawTiles(total) {
  const put = (id, text, note, exact = text) => {
    at(`total-${id}`).textContent = text;
    at(`total-${id}`).title = exact;
    at(`note-${id}`).textContent = note;
  };
  const each = total.requests > 0 ? `${roundDollars(Number(total.nanos) / 1e9 / total.requests)} a request` : "";
  const share = total.input > 0 ? `, ${((100 * total.cached) / total.input).toFixed(1)} %` : "";
  put("spend", roundDollars(Number(total.nanos) / 1e9), each, exactDollars(total.nanos));
  put("requests", COUNT.format(total.requests), "");
  put("input", COUNT.format(total.input), `${COUNT.format(total.cached)} cached${share}`);
  put(
    "output",
    COUNT.format(total.output),
    total.requests > 0 ? `${COUNT.format(Math.round(total.output / total.requests))} a request` : "",
  );
}

function labelOf(name) {
  return name === null ? `(${UNNAMED[shown.group]})` : name;
}

function colorOf(name) {
  if (!colors.has(name)) colors.set(name, `f${colors.size % LAYERS}`);
  return colors.get(name);
}

/** The largest series each for itself, the others as one. */
function layersOf(series) {
  const large = series.length > LAYERS + 1 ? series.slice(0, LAYERS) : series.slice(0, LAYERS + 1);
  const rest = series.slice(large.length);
  const layer = (one, index) => ({
    name: labelOf(one.name),
    color: index < LAYERS ? colorOf(one.name) : "f7",
    at: (start) => one.points.get(start) ?? emptyFigures(),
  });
  const layers = distinct(large.map(layer));
  if (rest.length > 0) layers.push({ name: `${rest.length} others`, color: "f7", at: whole(rest.map(layer)) });
  return layers;
}

/** Two large series never wear one colour: the later one takes a colour that is free. */
function distinct(layers) {
  const taken = new Set();
  return layers.map((layer) => {
    let { color } = layer;
    for (let next = 0; taken.has(color) && next <= LAYERS; next += 1) color = `f${next}`;
    taken.add(color);
    return { ...layer, color };
  });
}

function whole(layers) {
  return (start) => {
    const sum = emptyFigures();
    for (const layer of layers) addFigures(sum, layer.at(start));
    return sum;
  };
}

function splitTable(by, series, total) {
  const heads = ["Requests", "Input tokens", "of them cached", "Output tokens", "Spend", "Share of spend"];
  const columns = [{ name: GROUPS[shown.group].name }, ...heads.map((name) => ({ name, number: true }))];
  const share = ({ nanos }) =>
    total.nanos > 0n ? `${(Number((nanos * 10000n) / total.nanos) / 100).toFixed(1)} %` : "–";
  const cells = (figures) => [
    ...[figures.requests, figures.input, figures.cached, figures.output].map((count) => COUNT.format(count)),
    exactDollars(figures.nanos),
    share(figures),
  ];
  if (series.length === 0) return element("p", { class: "hint" }, NOTHING);
  const rows = series.map((one) => [labelOf(one.name), ...cells(one.total)]);
  return table(`Usage by ${by}`, columns, rows, ["All", ...cells(total)]);
}

const LATENCIES = [
  ["first_token_ms", "First token"],
  ["total_ms", "Whole answer"],
];

function drawLatency(answer) {
  const rows = answer.data.filter((row) => row.requests > 0);
  if (rows.length === 0) return element("p", { class: "hint" }, NOTHING);
  const most = LATENCIES.map(([kind]) =>
    Math.max(...rows.flatMap((row) => PERCENTILES.map((p) => row[kind]?.[p] ?? 0))),
  );
  const head = (words, percentile) =>
    element(
      "span",
      {},
      element("span", { class: "unseen" }, `${words} `),
      element("span", { class: `dot ${percentile}`, "aria-hidden": "true" }),
      percentile,
    );
  const columns = [
    { name: "Model" },
    { name: "Requests", number: true },
    ...LATENCIES.flatMap(([, words]) => [
      { name: words },
      ...PERCENTILES.map((percentile) => ({ name: head(words, percentile), number: true })),
    ]),
  ];
  const figuresOf = (row) =>
    LATENCIES.flatMap(([kind], index) => [
      ladder(row[kind], most[index]),
      ...PERCENTILES.map((percentile) => milliseconds(row[kind]?.[percentile])),
    ]);
  const cells = rows.map((row) => [row.model ?? "–", COUNT.format(row.requests), ...figuresOf(row)]);
  return table("Latency by model", columns, cells);
}

function drawLimits(answer) {
  const rows = answer.data.flatMap((key) => key.limits.map((limit) => limitRow(key, limit)));
  if (rows.length === 0) return element("p", { class: "hint" }, "No key has a limit.");
  const names = ["Key", "Owner", "Team", "Limit", "Used", "", "Of", "Left", "Begins anew"];
  return table(
    "Limits",
    names.map((name) => ({ name, number: ["Used", "Of", "Left"].includes(name) })),
    rows,
  );
}

function limitRow(key, limit) {
  const amount = (value) =>
    limit.name.startsWith("nanos_") ? exactDollars(BigInt(Math.round(value))) : COUNT.format(value);
  const name = LIMIT_NAMES[limit.name] ?? limit.name;
  const bar = meter(limit.used, limit.limit, `${name} of ${key.api_key_id}`);
  return [
    key.api_key_id,
    key.owner ?? "–",
    key.team ?? "–",
    name,
    amount(limit.used),
    bar,
    amount(limit.limit),
    amount(limit.remaining),
    resetText(limit.resets_at),
  ];
}

/** Unix seconds or an ISO time; what has no period never begins anew. */
function resetText(value) {
  if (value === null || value === undefined) return "–";
  const seconds = typeof value === "number" ? value : Date.parse(value) / 1000;
  return moment(seconds, 60, true);
}

function start() {
  readChoices();
  fillControls();
  for (const id of ["range", "width", "group", "refresh"]) at(id).addEventListener("change", chosen);
  at("key-form").addEventListener("submit", signedIn);
  at("reload").addEventListener("click", load);
  at("forget").addEventListener("click", () => signIn());
  document.addEventListener("visibilitychange", lookedAt);
  let width = at("spend-chart").clientWidth;
  new ResizeObserver(() => {
    const now = at("spend-chart").clientWidth;
    if (now === 0 || now === width) return;
    width = now;
    drawUsage();
  }).observe(at("spend-chart"));
  if (sessionStorage.getItem(KEY) === null) signIn();
  else open();
}

start();
