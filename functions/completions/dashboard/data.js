"use strict";
// The usage API: what is asked of it, and the figures made of its answers. Money is whole nano-dollars in a BigInt.

const WIDTHS = {
  "1m": { name: "1 minute", seconds: 60, page: 1440 },
  "1h": { name: "1 hour", seconds: 3600, page: 168 },
  "1d": { name: "1 day", seconds: 86400, page: 31 },
};
// The first width is the one a time starts with; no chart has more than 360 bars.
const RANGES = {
  "1h": { name: "Last hour", seconds: 3600, widths: ["1m"] },
  "6h": { name: "Last 6 hours", seconds: 6 * 3600, widths: ["1m", "1h"] },
  "24h": { name: "Last 24 hours", seconds: 24 * 3600, widths: ["1h"] },
  "7d": { name: "Last 7 days", seconds: 7 * 86400, widths: ["1d", "1h"] },
  "30d": { name: "Last 30 days", seconds: 30 * 86400, widths: ["1d"] },
  "90d": { name: "Last 90 days", seconds: 90 * 86400, widths: ["1d"] },
  month: { name: "This month", months: 0, widths: ["1d"] },
  "last-month": { name: "Last month", months: -1, widths: ["1d"] },
};
const GROUPS = {
  model: { name: "Model", words: "model", field: "model", costField: "line_item" },
  key: { name: "API key", words: "API key", field: "api_key_id", costField: "api_key_id" },
  owner: { name: "Owner", words: "owner", field: "user_id", costField: "user_id" },
  team: { name: "Team", words: "team", field: "project_id", costField: "project_id" },
};
const REQUEST_MS = 30000;
const MAX_PAGES = 50;

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Whole buckets that cover a range up to `now`: Unix seconds, `end` exclusive. */
function timeframe(rangeId, widthId, now) {
  const range = RANGES[rangeId];
  const step = WIDTHS[widthId].seconds;
  let end = Math.floor(now / step) * step + step;
  let start = end - (range.seconds ?? 0);
  if (range.months !== undefined) {
    const day = new Date(now * 1000);
    const first = (months) => Date.UTC(day.getUTCFullYear(), day.getUTCMonth() + months, 1) / 1000;
    start = first(range.months);
    if (range.months < 0) end = first(range.months + 1);
  }
  return { start, end, step };
}

/** The JSON at a path below the page's own folder, which has the API's stage in it. */
async function ask(path, query, key, signal) {
  const url = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  let reply;
  let body = null;
  try {
    reply = await fetch(url, {
      headers: { authorization: `Bearer ${key}`, accept: "application/json" },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.any([signal, AbortSignal.timeout(REQUEST_MS)]),
    });
    body = await reply.text();
  } catch (error) {
    if (signal.aborted) throw error;
    if (error.name === "TimeoutError")
      throw new ApiError(0, `The gateway did not answer within ${REQUEST_MS / 1000} s.`);
    throw new ApiError(0, "The gateway cannot be reached. Is it running, and is this machine on its network?");
  }
  let json = null;
  try {
    json = JSON.parse(body);
  } catch {
    if (reply.ok) throw new ApiError(502, `The answer to ${path} is not JSON.`);
  }
  if (reply.ok) return json;
  throw new ApiError(reply.status, refusal(reply, json));
}

function refusal(reply, json) {
  const said = typeof json?.error?.message === "string" ? json.error.message : "";
  const id = reply.headers.get("x-request-id");
  const trace = reply.status >= 500 && id ? ` Request ${id}.` : "";
  if (reply.status === 401) return `The key was not accepted. ${said}`;
  if (reply.status === 403) return `This key may not read usage: an admin key is needed. ${said}`;
  if (reply.status === 429) return `Too many requests for now. ${said}`;
  return `The gateway answered ${reply.status}. ${said}${trace}`;
}

/** Every bucket of a paged answer. */
async function askPages(path, query, key, signal) {
  const buckets = [];
  let page = null;
  for (let count = 0; count < MAX_PAGES; count += 1) {
    const json = await ask(path, page === null ? query : { ...query, page }, key, signal);
    if (!Array.isArray(json?.data)) throw new ApiError(502, `The answer to ${path} has no data.`);
    buckets.push(...json.data);
    if (!json.has_more) return buckets;
    page = json.next_page;
  }
  throw new ApiError(502, `The answer to ${path} has no end.`);
}

/** A number or decimal text of dollars as nano-dollars. */
function nanosOf(value) {
  const text = typeof value === "number" ? value.toFixed(9) : String(value);
  const match = /^(-?)(\d+)(?:\.(\d{1,9})0*)?$/.exec(text);
  if (match === null) throw new ApiError(502, "An amount is not a number of dollars.");
  const nanos = BigInt(match[2]) * 1000000000n + BigInt((match[3] ?? "").padEnd(9, "0"));
  return match[1] ? -nanos : nanos;
}

function emptyFigures() {
  return { requests: 0, input: 0, cached: 0, output: 0, nanos: 0n };
}

function addFigures(to, from) {
  for (const name of Object.keys(to)) to[name] += from[name];
}

const FIGURES = {
  "organization.usage.completions.result": (result) => ({
    ...emptyFigures(),
    requests: result.num_model_requests,
    input: result.input_tokens,
    cached: result.input_cached_tokens ?? 0,
    output: result.output_tokens,
  }),
  "organization.costs.result": (result) => ({ ...emptyFigures(), nanos: nanosOf(result.amount.value) }),
};

/**
 * Usage and costs as one series for each name: its figures in all, and by the start of the bucket. The name `null` is
 * what has none. Sorted by spend, then tokens.
 */
function seriesOf(buckets, nameOf) {
  const found = new Map();
  for (const bucket of buckets) {
    for (const result of bucket.results) {
      const name = nameOf(result);
      const figures = FIGURES[result.object](result);
      const series = found.get(name) ?? { name, total: emptyFigures(), points: new Map() };
      const point = series.points.get(bucket.start_time) ?? emptyFigures();
      addFigures(point, figures);
      addFigures(series.total, figures);
      series.points.set(bucket.start_time, point);
      found.set(name, series);
    }
  }
  const tokens = (series) => series.total.input + series.total.output;
  return [...found.values()].sort(
    (a, b) =>
      Number(b.total.nanos - a.total.nanos) || tokens(b) - tokens(a) || String(a.name).localeCompare(String(b.name)),
  );
}

const COUNT = new Intl.NumberFormat("en-US");
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

/** Every nano-dollar: at least two decimals, no zeros behind them. */
function exactDollars(nanos) {
  const size = nanos < 0n ? -nanos : nanos;
  const whole = COUNT.format(size / 1000000000n);
  const rest = String(size % 1000000000n)
    .padStart(9, "0")
    .replace(/0+$/, "")
    .padEnd(2, "0");
  return `${nanos < 0n ? "-" : ""}$${whole}.${rest}`;
}

const CENTS = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
const DIGITS = { maximumSignificantDigits: 3, maximumFractionDigits: 9, roundingPriority: "lessPrecision" };

/** Cents where it is much, three digits that say something where it is little. */
function roundDollars(dollars) {
  const size = Math.abs(dollars);
  if (size === 0) return "$0";
  if (size >= 10000) return `$${COMPACT.format(dollars)}`;
  return `$${dollars.toLocaleString("en-US", size >= 0.995 ? CENTS : DIGITS)}`;
}

const TWO = (number) => String(number).padStart(2, "0");

/** The start of a bucket; `full` has the day, and the year's last two digits are of no use here. */
function moment(seconds, step, full) {
  const at = new Date(seconds * 1000);
  const day = `${at.toLocaleString("en-US", { month: "short", timeZone: "UTC" })} ${at.getUTCDate()}`;
  const time = `${TWO(at.getUTCHours())}:${TWO(at.getUTCMinutes())}`;
  if (step >= 86400) return full ? `${day}, ${at.getUTCFullYear()}` : day;
  if (full) return `${day}, ${time}`;
  return at.getUTCHours() === 0 && at.getUTCMinutes() === 0 ? day : time;
}

function milliseconds(value) {
  if (typeof value !== "number") return "–";
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
}
