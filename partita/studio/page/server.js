/**
 * Everything that leaves the page: JSON calls to the server that served it, with the token of the address.
 *
 *     available                  false on the static page (no `?token=` in the address): then nothing is ever fetched from /api
 *     hello()                    what the server says of itself, asked once: {version, methods, limits, downloads}
 *     call(path, body, options)  GET without a body, POST with one, or options.method; resolves to the JSON, rejects with
 *                                a `StudioError`
 *     job(kind, body, options)   runs a job to its end and resolves to its result; options = {onProgress(status), signal}.
 *                                An aborted signal cancels the job on the server and rejects with type "Cancelled"
 *     downloadAddress(id)        the path of a finished export; fetch it with `fetchBytes(id)`, which sends the token
 *     onConnection(fn)           fn(true|false) when the server is lost and when it answers again
 *
 * A lost server is looked for every two seconds; calls made meanwhile reject with type "ServerLost".
 */

const token = new URLSearchParams(location.search).get("token");
export const available = token !== null && token !== "";

/** An error with the parts that the server sends; `where`, `start` and `end` mark the place in a text, or are null. */
export class StudioError extends Error {
  constructor({ type = "Error", message, short = null, where = null, start = null, end = null, status = 0, retryAfter = null }) {
    super(message);
    Object.assign(this, { type, short, where, start, end, status, retryAfter });
  }
}

const listeners = new Set();
let connected = available;
let searching = null;

export function onConnection(fn) {
  listeners.add(fn);
  return () => listeners.delete(fn);
}

function setConnected(value) {
  if (connected === value) return;
  connected = value;
  for (const tell of listeners) tell(value);
  if (!value && searching === null) searching = setInterval(look, 2000);
  if (value && searching !== null) { clearInterval(searching); searching = null; }
}

async function look() {
  try {
    const reply = await fetch("api/hello", { headers: { "X-Partita-Token": token }, cache: "no-store" });
    if (reply.ok) setConnected(true);
  } catch { /* still lost */ }
}

async function request(path, { method, body, signal }) {
  if (!available) throw new StudioError({ type: "NoServer", message: "This page has no server. Run `partita studio` to compile and to prove bounds." });
  const headers = { "X-Partita-Token": token };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path.replace(/^\//, ""), { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw new StudioError({ type: "Cancelled", message: "Cancelled." });
    setConnected(false);
    throw new StudioError({ type: "ServerLost", message: "The server does not answer. The page keeps trying. If you stopped the studio, run `partita studio` again and open the address that it prints." });
  }
  setConnected(true);
  return reply;
}

async function failure(reply) {
  let error = null;
  try { error = (await reply.json()).error; } catch { /* not JSON */ }
  const retryAfter = Number(reply.headers.get("Retry-After")) || null;
  return new StudioError({ message: `The server answered ${reply.status}.`, ...error, status: reply.status, retryAfter });
}

export async function call(path, body, { method = body === undefined ? "GET" : "POST", signal } = {}) {
  const reply = await request(path, { method, body, signal });
  if (!reply.ok) throw await failure(reply);
  return reply.status === 204 ? null : reply.json();
}

let greeting = null;
export function hello() {
  greeting ??= call("/api/hello").catch((error) => { greeting = null; throw error; });
  return greeting;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function job(kind, body, { onProgress = () => {}, signal } = {}) {
  const cancelled = () => new StudioError({ type: "Cancelled", message: "Cancelled." });
  if (signal?.aborted) throw cancelled();
  const { id } = await call("/api/jobs", { kind, ...body });
  const path = `/api/jobs/${encodeURIComponent(id)}`;
  for (let wait = 80; ; wait = Math.min(wait * 1.4, 500)) {
    await pause(wait);
    if (signal?.aborted) {
      call(path, undefined, { method: "DELETE" }).catch(() => {});
      throw cancelled();
    }
    const status = await call(path);
    if (signal?.aborted) continue;
    if (status.state === "done") return status.result;
    if (status.state === "cancelled") throw cancelled();
    if (status.state === "failed") throw new StudioError({ message: "The job failed.", ...status.error });
    onProgress(status);
  }
}

export const downloadAddress = (id) => `/api/downloads/${encodeURIComponent(id)}`;

/** The bytes of a finished export, and the name that the server gave them. */
export async function fetchBytes(id) {
  const reply = await request(downloadAddress(id), { method: "GET" });
  if (!reply.ok) throw await failure(reply);
  const name = /filename="?([^";]+)"?/.exec(reply.headers.get("Content-Disposition") ?? "")?.[1] ?? "partita-export";
  return { bytes: await reply.blob(), name };
}
