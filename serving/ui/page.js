// The page for people. It asks the server that it came from, and nobody else; whatever comes back is
// shown as text, never as HTML. The key is kept for this tab alone.
"use strict";

const EVERY_MS = 2000; // between two looks
const SPAN_MS = 10 * 60_000; // that plots go back at most
const SMOOTH = 5; // looks that a point of a plot is made of
const KEY = "slipway-key";

const $ = (id) => document.getElementById(id);

/** An element with properties and children; text stays text. */
function el(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const number = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(100 * value)}%`;

function seconds(value) {
  if (value < 1) return `${number(1000 * value)} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

/** Fill a table: its titles, and rows of texts or elements. */
function fill(table, titles, rows, empty = "") {
  const cell = (value, title) => {
    const made = el("td", {}, value ?? "");
    made.dataset.title = title; // which a phone shows before it
    return made;
  };
  const head = el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title))));
  const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, n) => cell(value, titles[n])))));
  if (!rows.length) body.append(el("tr", {}, el("td", { colSpan: titles.length, className: "quiet" }, empty)));
  table.replaceChildren(head, body);
}

/** A state, what else is to be said of it, and why it is so. */
function stateOf(state, more, why) {
  const pill = el("span", { className: `pill ${state}` }, more ? `${state}, ${more}` : state);
  const bad = ["failed", "down"].includes(state);
  return el("span", {}, pill, why ? el("div", { className: bad ? "fault" : "quiet" }, why) : null);
}

// The server

let key = sessionStorage.getItem(KEY) ?? "";

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask the server. Throws Refused with what it says, and TypeError where it does not answer. */
async function ask(path, options = {}) {
  const headers = { accept: "application/json", ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.text();
  let said = body;
  try {
    const found = JSON.parse(body);
    said = found.error?.message ?? found.message ?? found.detail ?? found.error ?? body;
  } catch {} // not JSON: as it is
  if (answer.status === 401) said = `${key ? "the key above is not valid here" : "this server has keys"}: type one into the field above`;
  throw new Refused(answer.status, String(said || `status ${answer.status}`));
}

const post = (path, body, more = {}) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), ...more });

// What is known of it

let ping = { status: "asking" };
let status = null; // of /ui/status, for admin keys alone
let start = 0; // how many replicas are before the page of them that is shown
let refused = ""; // why there is none
let chatRefused = ""; // why there is no chat
let models = []; // of /v1/models
let adapters = null; // of /adapters
let samples = [];
let asked = 0; // counts keys, so that answers to an earlier one are dropped

const ready = () => ping.status === "ready" || ping.status === "failing";
const isRouter = () => Boolean(status?.replicas);
const hasCopies = () => Boolean(status?.replicas?.some(({ copy }) => copy !== undefined));

async function look() {
  const round = asked;
  const was = ready();
  try {
    const answer = await fetch("ping", { cache: "no-store" });
    ping = await answer.json();
  } catch {
    // A process that has failed is gone a moment later: its last words stay.
    if (ping.status !== "unreachable") ping = { status: "unreachable", last: ping };
  }
  if (ping.status !== "unreachable" && !refused) {
    try {
      const found = await (await ask(start ? `ui/status?start=${start}` : "ui/status")).json();
      const text = await (await ask("metrics")).text();
      if (round !== asked) return;
      status = found;
      sample(text);
    } catch (error) {
      if (round !== asked) return;
      if (error instanceof Refused && [401, 403].includes(error.status)) refused = error.message;
    }
  }
  if (ready() && (!was || !(models.length || chatRefused))) await lookForModels();
  show();
}

/** What can be asked for: the models and adapters of this key. */
async function lookForModels() {
  try {
    models = (await (await ask("v1/models")).json()).data;
    chatRefused = "";
  } catch (error) {
    models = [];
    chatRefused = error.message;
  }
  const chosen = $("target").value;
  $("target").replaceChildren(
    ...models.map(({ id, parent }) => el("option", { value: id }, parent ? `${id} (adapter)` : id)),
  );
  if (models.some(({ id }) => id === chosen)) $("target").value = chosen;
  await lookForAdapters();
}

async function lookForAdapters() {
  if (refused) return;
  const found = [];
  let page = "";
  try {
    do {
      const answer = await (await ask(`adapters?limit=100${page && `&next_page_token=${page}`}`)).json();
      found.push(...answer.adapters);
      page = answer.nextPageToken ?? "";
    } while (page);
    adapters = { listed: found };
  } catch (error) {
    adapters = { fault: error.message };
  }
  showAdapters();
}

// Plots, of what /metrics counts

/** The labels of a series by name. Prometheus escapes `\\`, `"` and line ends in them, and else nothing. */
function labelled(text) {
  const found = new Map();
  for (const [, name, value] of text.matchAll(/(\w+)="((?:[^"\\]|\\[^])*)",?/gy)) {
    found.set(name, value.replace(/\\([^])/g, (_, it) => (it === "n" ? "\n" : it)));
  }
  return found;
}

/** Series by name, summed over their labels; those of histograms by the upper ends of buckets. */
function parsed(metrics) {
  const found = new Map();
  for (const line of metrics.split("\n")) {
    if (line.startsWith("#")) continue;
    const match = line.match(/^([\w:]+)(?:\{([^]*)\})? (\S+)$/);
    if (!match) continue;
    const [, name, text = "", value] = match;
    const counts = name === "slipway_tokens_total";
    const labels = counts || name.endsWith("_bucket") ? labelled(text) : new Map();
    const end = labels.get("le");
    if (end === undefined) found.set(name, (found.get(name) ?? 0) + Number(value));
    else {
      if (!found.has(name)) found.set(name, new Map());
      const at = end === "+Inf" ? Infinity : Number(end);
      found.get(name).set(at, (found.get(name).get(at) ?? 0) + Number(value));
    }
    if (counts) {
      if (!found.has("tokens")) found.set("tokens", []);
      found.get("tokens").push([labels, Number(value)]);
    }
  }
  return found;
}

/** What has come to be between two looks. */
class Window {
  constructor(before, now) {
    this.before = before.series;
    this.now = now.series;
    this.seconds = (now.at - before.at) / 1000;
  }

  gained(name) {
    const gained = (this.now.get(name) ?? NaN) - (this.before.get(name) ?? 0);
    return gained >= 0 ? gained : null; // null: there is none, or the server started anew
  }

  rate(name) {
    const gained = this.gained(name);
    return gained === null ? null : gained / this.seconds;
  }

  share(part, whole) {
    const all = this.gained(whole);
    return all ? (this.gained(part) ?? 0) / all : null;
  }

  /** As Prometheus' histogram_quantile has it. */
  quantile(name, part) {
    const buckets = this.now.get(`${name}_bucket`);
    if (!buckets) return null;
    const before = this.before.get(`${name}_bucket`);
    const counts = [...buckets].map(([end, count]) => [end, count - (before?.get(end) ?? 0)]);
    counts.sort(([one], [other]) => one - other);
    const all = counts.at(-1)[1];
    if (!(all > 0)) return null;
    let [low, under] = [0, 0];
    for (const [end, count] of counts) {
      if (count >= part * all) {
        if (end === Infinity) return low;
        return low + ((end - low) * (part * all - under)) / (count - under || 1);
      }
      [low, under] = [end, count];
    }
    return null;
  }
}

const quantiles = (name) => [
  ["P50", (window) => window.quantile(name, 0.5)],
  ["P90", (window) => window.quantile(name, 0.9)],
];
const rate = (label, name) => [label, (window) => window.rate(name)];
const share = (label, part, whole) => [label, (window) => window.share(part, whole)];
const level = (label, name) => [label, (window) => window.now.get(name) ?? null];
const LMCACHE = "lmcache_mp_lookup_requested_tokens_total";

/** Each with its lines; one whose series the server does not have is not shown. */
const CHARTS = [
  { title: "Time to first token", unit: seconds, lines: quantiles("vllm:time_to_first_token_seconds"), needs: "vllm:time_to_first_token_seconds_bucket" },
  { title: "Inter-token latency", unit: seconds, lines: quantiles("vllm:inter_token_latency_seconds"), needs: "vllm:inter_token_latency_seconds_bucket" },
  {
    title: "Requests", unit: number, needs: "slipway_requests_in_flight",
    lines: [level("in flight", "slipway_requests_in_flight"), level("waiting", "slipway_requests_queued")],
  },
  {
    title: "Tokens a second", unit: number, needs: "vllm:generation_tokens_total",
    lines: [rate("generated", "vllm:generation_tokens_total"), rate("prompt", "vllm:prompt_tokens_total")],
  },
  {
    title: "Prompt tokens found in caches", unit: percent, most: 1, needs: "vllm:prefix_cache_queries_total",
    lines: [
      share("engine", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
      share("memory (L1)", "lmcache_mp_lookup_hit_l1_tokens_total", LMCACHE),
      share("disk and store (L2)", "lmcache_mp_lookup_hit_l2_tokens_total", LMCACHE),
    ],
  },
  { title: "First byte through the router", unit: seconds, lines: quantiles("slipway_router_first_byte_seconds"), needs: "slipway_router_first_byte_seconds_bucket" },
  { title: "Requests at replicas", unit: number, lines: [level("in flight", "slipway_router_in_flight")], needs: "slipway_router_in_flight" },
  {
    title: "Prompt tokens expected in caches", unit: percent, most: 1, needs: "slipway_router_prompt_tokens_total",
    lines: [share("on the replica", "slipway_router_cached_tokens_total", "slipway_router_prompt_tokens_total")],
  },
];

function sample(text) {
  const now = { at: Date.now(), series: parsed(text) };
  const before = samples.at(-SMOOTH) ?? samples[0];
  now.values = CHARTS.map(({ lines }) =>
    lines.map(([, value]) => (before ? value(new Window(before, now)) : null)),
  );
  if (samples.length > SMOOTH) samples.at(-SMOOTH - 1).series = null; // what no window needs
  samples.push(now);
  samples = samples.filter(({ at }) => now.at - at <= SPAN_MS);
}

/** A round number that is not below a value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

function drawCharts() {
  const series = samples.at(-1)?.series;
  if (!series) return;
  CHARTS.forEach((chart, n) => {
    if (!chart.figure && series.has(chart.needs)) makeChart(chart, n);
    if (chart.figure) drawChart(chart, n);
  });
}

function makeChart(chart, n) {
  chart.marks = chart.lines.map(([label], line) => ({
    path: svg("path", { class: `line line-${line}` }),
    value: el("b"),
    item: label,
  }));
  chart.cursor = svg("line", { class: "cursor", y1: 0, y2: 100, x1: 0, x2: 0 });
  const grid = [0, 50, 100].map((y) => svg("line", { class: "grid", x1: 0, x2: 1000, y1: y, y2: y }));
  chart.plot = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
  chart.plot.append(...grid, ...chart.marks.map(({ path }) => path), chart.cursor);
  chart.top = el("span");
  chart.since = el("span");
  const legend = chart.marks.map(({ item, value }, line) =>
    el("span", { className: "item" }, el("i", { className: `dot line-${line}` }), `${item} `, value),
  );
  chart.figure = el(
    "figure", { className: "card chart" },
    el("figcaption", {}, el("h2", {}, chart.title), el("div", { className: "legend" }, ...legend)),
    el("div", { className: "plot" }, el("div", { className: "scale" }, chart.top, el("span", {}, "0")), chart.plot),
    el("div", { className: "times" }, chart.since, el("span", {}, "now")),
  );
  chart.plot.addEventListener("pointermove", (event) => {
    const box = chart.plot.getBoundingClientRect();
    chart.at = (event.clientX - box.left) / box.width;
    drawChart(chart, n);
  });
  chart.plot.addEventListener("pointerleave", () => {
    chart.at = undefined;
    drawChart(chart, n);
  });
  const after = CHARTS.slice(n + 1).find(({ figure }) => figure)?.figure ?? null;
  $("charts").insertBefore(chart.figure, after);
}

function drawChart(chart, n) {
  const now = samples.at(-1).at;
  const span = Math.min(SPAN_MS, Math.max(60_000, now - samples[0].at));
  const values = samples.flatMap((it) => it.values[n]).filter((value) => value !== null);
  const most = chart.most ?? ceiling(Math.max(...values, 0) || 1);
  const x = (at) => 1000 * (1 - (now - at) / span);
  chart.marks.forEach(({ path }, line) => {
    let [d, before] = ["", null];
    for (const { at, values } of samples) {
      const value = values[n][line];
      const point = value === null ? null : `${x(at).toFixed(1)} ${(100 - (100 * value) / most).toFixed(1)}`;
      if (point) d += before ? `L${point}` : `M${point}h.01`;
      before = point;
    }
    path.setAttribute("d", d);
  });
  let shown = samples.at(-1);
  if (chart.at !== undefined) {
    const at = now - (1 - chart.at) * span;
    shown = samples.reduce((one, other) => (Math.abs(other.at - at) < Math.abs(one.at - at) ? other : one));
  }
  for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, x(shown.at));
  const said = chart.marks.map(({ value, item }, line) => {
    const found = shown.values[n][line];
    value.textContent = found === null ? "–" : chart.unit(found);
    return `${item} ${value.textContent}`;
  });
  chart.plot.setAttribute("aria-label", `${chart.title}: ${said.join(", ")}`);
  chart.top.textContent = chart.unit(most);
  chart.since.textContent = span < 90_000 ? `${Math.round(span / 1000)} s ago` : `${Math.round(span / 60_000)} min ago`;
}

// Requests, by whom and for what

function drawRequests() {
  const rows = new Map();
  const row = (tenant, adapter) => {
    const name = JSON.stringify([tenant, adapter]);
    if (!rows.has(name)) rows.set(name, { tenant, adapter, waiting: 0, in_flight: 0, input: 0, cached: 0, output: 0 });
    return rows.get(name);
  };
  for (const { tenant, adapter, waiting, in_flight } of status?.requests ?? []) {
    Object.assign(row(tenant, adapter), { waiting, in_flight });
  }
  for (const [labels, value] of samples.at(-1)?.series.get("tokens") ?? []) {
    const label = (name) => labels.get(name) ?? "";
    const found = row(label("tenant"), label("adapter"));
    found[label("direction")] += value;
    if (label("cached") === "true") found.cached += value;
  }
  const sorted = [...rows.values()].sort(
    (one, other) => other.in_flight + other.waiting - one.in_flight - one.waiting || other.input - one.input,
  );
  const now = isRouter() ? [] : ["In flight", "Waiting"]; // which a router does not know by tenant
  const titles = ["Tenant", "Adapter", ...now, "Prompt tokens", "of them cached", "Generated"];
  const counted = !isRouter() || hasCopies(); // copies have no page of their own
  fill(
    $("requests"), counted ? titles : [],
    (counted ? sorted : []).slice(0, 50).map((it) => [
      it.tenant || "–", it.adapter || "base model",
      ...(now.length ? [number(it.in_flight), number(it.waiting)] : []), number(it.input), it.input ? percent(it.cached / it.input) : "–", number(it.output),
    ]),
    counted ? "No request yet." : "Replicas count these; each shows them at its own /ui.",
  );
}

// Adapters

function showAdapters() {
  const note = $("adapters-note");
  $("register").hidden = !adapters?.listed;
  note.textContent = adapters?.fault ?? "";
  note.hidden = !note.textContent;
  $("adapter-table").parentElement.parentElement.hidden = !adapters;
  $("adapter-table").hidden = !adapters?.listed;
  if (!adapters?.listed) return;
  const known = JSON.stringify([adapters.listed, status?.adapters]);
  if (known === showAdapters.known) return; // else the buttons would lose their focus
  showAdapters.known = known;
  const states = new Map((status?.adapters ?? []).map((it) => [it.name, it]));
  const rows = adapters.listed.map(({ name, src, pin }) => {
    const { state = "registered", fault = null } = states.get(name) ?? {};
    const shown = fault && state === "registered" ? "failed" : state;
    const remove = el("button", { type: "button", className: "quiet danger" }, "Remove");
    const load = el("button", { type: "button", className: "quiet" }, "Load");
    const path = `adapters/${encodeURIComponent(name)}`;
    load.hidden = state !== "registered";
    load.setAttribute("aria-label", `Load ${name}`);
    remove.setAttribute("aria-label", `Remove ${name}`);
    load.onclick = () =>
      change(`Loading ${name}…`, `${name} is loaded`, () => post(`${path}/update`, { preload: true }), load);
    remove.onclick = () => {
      const removed = () => ask(path, { method: "DELETE" });
      if (remove.dataset.sure) change(`Removing ${name}…`, `${name} is removed`, removed, remove);
      else {
        remove.dataset.sure = "yes";
        remove.textContent = "Remove it?";
        remove.onblur = () => {
          delete remove.dataset.sure;
          remove.textContent = "Remove";
        };
      }
    };
    return [
      el("b", {}, name), el("code", {}, src),
      stateOf(shown, pin && "pinned", fault),
      el("span", { className: "actions" }, load, remove),
    ];
  });
  fill($("adapter-table"), ["Name", "Source", "State", ""], rows, "No adapter is registered.");
}

async function change(doing, done, what, button) {
  const said = $("adapters-said");
  button.disabled = true;
  said.className = "";
  said.textContent = doing;
  try {
    await what();
    said.textContent = done;
    await look();
    await lookForModels();
  } catch (error) {
    said.className = "fault";
    said.textContent = error.message;
  }
  button.disabled = false;
}

$("register").addEventListener("submit", (event) => {
  event.preventDefault();
  const [name, src] = [$("adapter-name").value, $("adapter-src").value];
  const how = { preload: $("adapter-load").checked, pin: $("adapter-pin").checked };
  change(`Registering ${name}…`, `${name} is registered`, async () => {
    await post("adapters", { name, src, ...how });
    $("register").reset();
  }, event.submitter);
});

// Chat

let talk = [];
let answering = null; // what aborts the answer under way

function bubble(role, text) {
  const content = el("div", { className: "text" }, text);
  const made = el("article", { className: `bubble ${role}` }, content);
  made.setAttribute("aria-label", role === "user" ? "You" : "Model");
  $("log").append(made);
  $("log").scrollTop = $("log").scrollHeight;
  return { made, content };
}

/** The events of a stream, as objects. */
async function* events(body) {
  let rest = "";
  for await (const text of chunks(body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function* chunks(stream) {
  const reader = stream.getReader(); // Safari's streams are not iterable
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

async function send(text) {
  const target = models.find(({ id }) => id === $("target").value);
  const system = $("system").value.trim();
  const conversation = talk; // a new chat is another
  conversation.push({ role: "user", content: text });
  bubble("user", text);
  const { made, content } = bubble("model", "");
  made.setAttribute("aria-busy", "true");
  const stop = (answering = new AbortController());
  const began = performance.now();
  let [first, last, usage, thought, said] = [0, 0, null, null, ""];
  showComposer();
  try {
    const answer = await post(
      "v1/chat/completions",
      {
        model: target?.id,
        messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number($("most").value) || undefined,
        temperature: $("temperature").value === "" ? undefined : Number($("temperature").value),
      },
      { signal: stop.signal },
    );
    for await (const event of events(answer.body)) {
      if (event.error) throw new Refused(0, event.error.message ?? String(event.error));
      usage = event.usage ?? usage;
      const delta = event.choices?.[0]?.delta ?? {};
      const thinking = delta.reasoning ?? delta.reasoning_content;
      if (!delta.content && !thinking) continue;
      last = performance.now();
      first ||= last;
      const log = $("log");
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (thinking) {
        thought ??= made.insertBefore(el("details", { className: "thought" }, el("summary", {}, "Reasoning")), content);
        thought.append(thinking);
      }
      said += delta.content ?? "";
      content.append(delta.content ?? "");
      if (follows) log.scrollTop = log.scrollHeight;
    }
    made.append(el("div", { className: "facts" }, ...timings(began, first, last, usage).map((it) => el("span", {}, it))));
  } catch (error) {
    const stopped = error.name === "AbortError";
    const why = stopped ? "Stopped." : error instanceof TypeError ? "The server does not answer." : error.message;
    made.append(el("div", { className: stopped ? "facts" : "facts fault" }, why));
  }
  if (said) conversation.push({ role: "assistant", content: said });
  else conversation.pop(); // what was not answered is not sent again
  made.removeAttribute("aria-busy");
  $("log").scrollTop = $("log").scrollHeight;
  answering = null;
  showComposer();
  $("message").focus();
}

function timings(began, first, last, usage) {
  const told = [];
  if (first) told.push(`first token ${seconds((first - began) / 1000)}`);
  if (usage?.completion_tokens > 1 && last > first) {
    told.push(`${((1000 * (usage.completion_tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  }
  told.push(`${seconds((performance.now() - began) / 1000)} in all`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    told.push(`prompt ${number(usage.prompt_tokens)} tokens, ${number(cached)} cached`);
    told.push(`answer ${number(usage.completion_tokens)} tokens`);
  }
  return told;
}

function showComposer() {
  const may = ready() && !chatRefused;
  for (const part of $("chat").children) part.hidden = !may && !talk.length;
  $("send").textContent = answering ? "Stop" : "Send";
  $("send").disabled = !may && !answering;
  $("message").disabled = !may;
  $("message").placeholder = ready() ? "Message" : "The server is not ready";
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (answering) answering.abort();
  else if (text) {
    $("message").value = "";
    $("message").rows = 1;
    send(text);
  }
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answering) $("composer").requestSubmit();
  }
});
$("message").addEventListener("input", ({ target }) => {
  target.rows = Math.min(8, target.value.split("\n").length);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
});
$("clear").addEventListener("click", () => {
  answering?.abort();
  talk = [];
  $("log").replaceChildren();
  $("message").focus();
});

// The plan, the start, replicas

function showSteps(list, steps, now) {
  const rows = steps.map(({ text, seconds: taken }, n) => {
    const state = taken === null ? "to-come" : n === now ? "under-way" : "done";
    const item = el("li", { className: state }, el("span", {}, text), el("b", {}, taken === null ? "" : `${taken.toFixed(1)} s`));
    if (state === "under-way") item.setAttribute("aria-current", "step");
    return item;
  });
  list.replaceChildren(...rows);
}

function showStart() {
  const { status: stage, detail, elapsed_s: elapsed, last } = ping;
  const failed = stage === "failed" || (stage === "unreachable" && last?.status === "failed");
  const titles = {
    starting: elapsed === undefined ? "No replica is ready yet" : `Starting, for ${Math.round(elapsed)} s`,
    draining: "Draining: requests in flight are answered, new ones are refused",
    failing: "Requests fail",
    failed: "The server has failed",
    stopped: "The server has stopped",
    unreachable: failed ? "The server has failed, and is gone" : "The server does not answer; its log says why",
  };
  $("start").hidden = !(stage in titles);
  $("start").className = `card ${failed ? "failed" : stage}`;
  $("start-title").textContent = titles[stage] ?? "";
  const before = last?.detail && `${failed ? "" : `when last seen it was ${last.status}: `}${last.detail}`;
  $("start-detail").textContent = detail ?? before ?? "";
  const steps = status?.steps ?? [];
  const reached = steps.findLastIndex(({ seconds: taken }) => taken !== null);
  // What was passed over is not needed here, like fetching a model of this machine.
  const shown = steps.filter(
    (step, n) => step.seconds !== null || (n > reached && step.step !== "cache_server"),
  );
  if (stage === "starting") showSteps($("steps"), shown, shown.indexOf(steps[reached]));
  else $("steps").replaceChildren();
}

function showPlan() {
  const plan = status?.plan;
  if (!plan?.rows || status === showPlan.of) return;
  showPlan.of = status;
  showSteps($("started"), status.steps.filter(({ seconds: taken }) => taken !== null), -1);
  const said = JSON.stringify(plan);
  if (said === showPlan.said) return;
  showPlan.said = said;
  const rows = [];
  for (const [what, amount, why] of plan.rows) {
    if (what || amount) rows.push([what, amount, why]);
    else rows.at(-1)[2] += `\n${why}`; // more about the same
  }
  fill($("plan-table"), ["What", "How much", "Why"], rows);
  fill($("options-table"), ["Option", "Value", "From"], plan.options.map(([name, value, from]) => [el("code", {}, name), el("code", {}, value), from]));
  list($("findings"), plan.findings);
}

function list(box, texts) {
  box.hidden = !texts.length;
  box.replaceChildren(...texts.map((text) => el("p", {}, text)));
}

function showReplicas() {
  if (!isRouter()) return;
  list($("warnings"), status.warnings);
  const divided = status.replicas.some(({ role }) => role !== "both");
  const tokens = (it) =>
    Object.entries({ engine: it.kv_cache_tokens, ...it.kv_tier_tokens })
      .filter(([, count]) => count !== null)
      .map(([tier, count]) => `${tier} ${number(count)}`)
      .join(", ");
  const rows = status.replicas.map((it) => [
    el("span", {}, el("b", {}, it.copy === undefined ? it.replica : `copy ${it.copy}`), it.copy === undefined ? null : el("div", { className: "quiet" }, it.replica)),
    stateOf(it.state, it.kept_from_requests && "kept from requests", it.state === "ready" ? "" : it.detail),
    ...(divided ? [it.role === "both" ? "" : it.role] : []),
    number(it.requests_under_way), number(it.prompt_tokens_queued), it.models.join(", "), number(it.adapters),
    tokens(it) || "–",
  ]);
  const titles = ["Replica", "State", ...(divided ? ["Role"] : []), "In flight", "Prompt tokens queued", "Models", "Adapters", "KV cache, tokens"];
  fill($("replica-table"), titles, rows, "No replica is known.");
  showPages(rows.length);
}

/** Where in all replicas the rows are, and the pages before and after. */
function showPages(count) {
  const before = start;
  const turn = (text, to) => {
    const button = el("button", { type: "button", className: "quiet" }, text);
    button.addEventListener("click", () => {
      start = to;
      look();
    });
    return button;
  };
  $("replica-pages").hidden = !before && !status.next;
  $("replica-pages").replaceChildren(
    `${number(before + 1)} to ${number(before + count)} of ${number(status.count ?? count)} `,
    ...(before ? [turn("First", 0)] : []),
    ...(status.next ? [turn("Next", status.next)] : []),
  );
}

// The whole

function show() {
  $("stage").textContent = ping.status;
  $("stage").className = `stage ${ping.status}`;
  $("model").textContent = status?.models?.[0] ?? models[0]?.id ?? (isRouter() ? "router" : "");
  document.title = `Slipway: ${ping.status}`;
  for (const link of $("nav").children) {
    const view = link.hash.slice(1);
    if (view === "replicas") link.hidden = !isRouter();
    if (view === "plan") link.hidden = isRouter();
  }
  const views = [...$("nav").children].filter((link) => !link.hidden).map((link) => link.hash);
  const view = views.includes(location.hash) ? location.hash : views[0];
  for (const link of $("nav").children) {
    if (link.hash === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    $(link.hash.slice(1)).hidden = link.hash !== view || (refused && view !== "#chat");
  }
  const why = view === "#chat" ? chatRefused : refused;
  $("refused").hidden = !why;
  $("refused").textContent = `${why[0]?.toUpperCase()}${why.slice(1)}.`;
  showStart();
  showComposer();
  if (view === "#activity") {
    drawCharts();
    drawRequests();
  }
  if (view === "#adapters" && !document.activeElement.dataset.sure) showAdapters();
  if (view === "#plan") showPlan();
  if (view === "#replicas") showReplicas();
}

$("key").value = key;
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  asked += 1;
  [status, refused, chatRefused, models, adapters, samples] = [null, "", "", [], null, []];
  look();
});
addEventListener("hashchange", () => {
  show();
  if (ready() && location.hash === "#adapters") lookForAdapters(); // others may have changed them
  $("view").focus({ preventScroll: true });
});
document.addEventListener("visibilitychange", () => document.hidden || look());

(async () => {
  for (;;) {
    try {
      if (!document.hidden) await look();
    } catch (error) {
      console.error(error); // the next look may find something else
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
})();
