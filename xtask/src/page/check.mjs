// Looks at the live page of a running daemon in a real browser. No test command runs this: it needs
// Debian's `chromium`, node 20 and `npm install playwright-core` in the folder that it is run from.
//
//   node PATH/xtask/src/page/check.mjs --daemon http://127.0.0.1:9100 [--page FILE] [--pictures FOLDER]
//       [--locked http://127.0.0.1:9101 --token-file FILE] [--disk NAME] [--chromium FILE]
//
// `--page` puts that file in the place of the page that is built into the daemon, under the daemon's
// own Content-Security-Policy with the digests of that file in it. `--locked` is the same daemon behind a token; a job named `page-check`
// is paused, resumed and cancelled there, and a disk without exports is resized and gets a snapshot in the
// first folder with images. `--disk` is the one that pictures show open.
//
// Frames are told apart from those of a busy machine by what the page's thread has worked; where others
// compile meanwhile, `chrt -r 1 node ...` gives the browser the processor when it wants it. Pictures in
// docs/images went through `pngquant 64`.
//
// What must hold, each a line of output; the exit status is 1 if one does not:
// - every disk is listed, and only rows that are seen are in the document;
// - no frame takes more than 50 ms while the list is scrolled to its end and back;
// - all can be done with the keyboard alone, and what has the focus shows it;
// - nothing sticks out at 360 pixels;
// - a daemon that is gone is told, and one that is back, too;
// - nothing is asked of anybody else, and nothing is written to the console but refused connections.

import { createHash } from "node:crypto";
import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";

const { chromium } = createRequire(join(process.cwd(), "x"))("playwright-core");
const text = { type: "string" };
const { values: options } = parseArgs({
  options: { daemon: text, page: text, pictures: text, locked: text, "token-file": text, disk: text, chromium: text },
});
if (!options.daemon) throw new Error("--daemon says where the daemon listens");

const FRAME_MS = 50;
let failures = 0;
function tell(is, what) {
  if (!is) failures++;
  console.log(`${is ? "ok  " : "FAIL"} ${what}`);
}

const browser = await chromium.launch({
  executablePath: options.chromium || "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-background-networking"],
});

// A page of the daemon's at that address, and what it has asked for and said.
async function visit(address, settings = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...settings });
  const page = await context.newPage();
  const origin = new URL(address).origin, strangers = [], said = [];
  page.on("request", request => {
    if (!request.url().startsWith(origin + "/") && !request.url().startsWith("data:")) strangers.push(request.url());
  });
  page.on("console", message => { if (["error", "warning"].includes(message.type())) said.push(message.text()); });
  page.on("pageerror", error => said.push(String(error)));
  if (options.page) {
    await page.route(url => url.href.split("#")[0] === origin + "/", async route => {
      const answer = await route.fetch();
      const body = readFileSync(options.page, "utf8");
      const headers = { ...answer.headers(), "content-security-policy": strict(answer.headers()["content-security-policy"], body) };
      delete headers["content-length"];
      await route.fulfill({ status: answer.status(), headers, body });
    });
  }
  await page.goto(origin + "/" + (settings.hash || ""));
  return { page, context, strangers, said };
}
// A policy that lets this page's own script and style do something, and no other ones.
function strict(policy, body) {
  const digest = tag => {
    const inside = body.slice(body.indexOf(`<${tag}>`) + tag.length + 2, body.indexOf(`</${tag}>`));
    return `${tag}-src 'sha256-${createHash("sha256").update(inside).digest("base64")}'`;
  };
  return policy.replace(/script-src [^;]*/, digest("script")).replace(/style-src [^;]*/, digest("style"));
}
const listed = page => page.waitForFunction(() => /^[0-9]+ disks?$/.test(document.getElementById("count").textContent) && document.querySelector(".rows .line:not([hidden]) .c-size").textContent !== "–", null, { timeout: 30000 });

async function checkList({ page }) {
  const { disks } = await (await fetch(options.daemon + "/v1/host")).json();
  await listed(page);
  const seen = await page.evaluate(() => ({
    count: document.getElementById("list").getAttribute("aria-rowcount") - 1,
    rows: document.querySelectorAll(".rows .line").length,
  }));
  tell(seen.count === disks, `${seen.count} disks are listed of ${disks}, by ${seen.rows} rows`);
  tell(seen.rows < 60, "rows that nobody sees are not there");
}

// Scrolls with the wheel, at some thousand pixels a second, to the end and back.
async function checkFrames({ page }, name) {
  await page.evaluate(() => {
    const seen = window.seen = { frames: [], long: [] };
    let last = performance.now(), isOver = false;
    const frame = at => { seen.frames.push(at - last); last = at; if (!isOver) requestAnimationFrame(frame); };
    requestAnimationFrame(at => { last = at; requestAnimationFrame(frame); });
    const observe = (type, take) => new PerformanceObserver(list => { for (const one of list.getEntries()) take(one); }).observe({ type });
    observe("long-animation-frame", one => {
      const work = one.scripts.map(script => `${script.invoker} ${Math.round(script.duration)} ms`);
      seen.long.push(`${Math.round(one.duration)} ms (${work.join(", ") || "no script"}, blocked ${Math.round(one.blockingDuration)} ms)`);
    });
    seen.end = () => { isOver = true; };
  });
  await browser.startTracing(page, { categories: ["devtools.timeline", "disabled-by-default-devtools.timeline", "toplevel"] });
  await page.mouse.move(page.viewportSize().width / 2, 500);
  const end = await page.evaluate(() => document.getElementById("rows").scrollHeight - document.getElementById("rows").clientHeight);
  for (const sign of [1, -1]) {
    let before = -1;
    for (;;) {
      await page.mouse.wheel(0, sign * 400);
      await page.waitForTimeout(16);
      const top = await page.evaluate(() => document.getElementById("rows").scrollTop);
      if (top === before && (sign > 0 ? top >= end - 1 : top <= 0)) break;
      before = top;
    }
  }
  const seen = await page.evaluate(() => { window.seen.end(); return window.seen; });
  const work = longestTask(JSON.parse(await browser.stopTracing()).traceEvents);
  const frames = seen.frames.sort((a, b) => a - b), longest = frames.at(-1);
  const most = frames[Math.floor(frames.length * 0.99)];
  tell(longest <= FRAME_MS, `${name}: scrolled ${end} pixels and back: ${frames.length} frames, the longest ${longest.toFixed(1)} ms, ` +
    `99 of 100 within ${most.toFixed(1)} ms; the longest task of the page took ${work.toFixed(1)} ms of the CPU; ` +
    `frames over 50 ms: ${seen.long.join("; ") || "none"}`);
}
// The longest that the page's thread was at work without a pause, in milliseconds of the CPU: what a
// busy machine adds to it is not in it.
function longestTask(events) {
  const threads = events.filter(one => one.name === "thread_name" && one.args.name === "CrRendererMain").map(one => `${one.pid} ${one.tid}`);
  const tasks = events.filter(one => one.name.endsWith("RunTask") && threads.includes(`${one.pid} ${one.tid}`));
  if (!tasks.some(one => one.tdur > 0)) throw new Error("the trace has no times of tasks");
  return tasks.reduce((longest, one) => Math.max(longest, one.tdur || 0), 0) / 1000;
}

const focus = page => page.evaluate(() => {
  const one = document.activeElement, row = document.getElementById(one.getAttribute("aria-activedescendant"));
  const shape = getComputedStyle(row || one);
  return { id: one.id, tag: one.tagName, text: one.textContent.slice(0, 40), row: row?.querySelector(".who span").textContent, ring: shape.outlineStyle !== "none" && parseFloat(shape.outlineWidth) > 0 };
});
async function checkKeyboard({ page }) {
  const press = (...keys) => keys.reduce((before, key) => before.then(() => page.keyboard.press(key)), Promise.resolve());
  const stops = [];
  for (let step = 0; step < 30; step++) {
    await press("Tab");
    const at = await focus(page);
    stops.push(at);
    if (at.id === "list") break;
  }
  tell(stops.at(-1).id === "list", `the list has the focus after ${stops.length} tabs: ${stops.map(at => at.id || at.text).join(", ")}`);
  tell(stops.every(at => at.ring), "what has the focus has a ring");
  const first = (await focus(page)).row;
  await press("ArrowDown", "ArrowDown");
  const third = (await focus(page)).row;
  await press("End");
  const last = (await focus(page)).row;
  await press("PageUp", "Home");
  const home = (await focus(page)).row;
  tell(first === home && new Set([first, third, last]).size === 3, `arrows, End and Home lead to ${third}, ${last}, ${home}`);
  await press("ArrowDown", "Enter");
  const title = await page.textContent("#p-name"), opened = await focus(page);
  tell(await page.isVisible("#panel") && opened.id === "p-name", `Enter opens ${title}`);
  await press("Escape");
  tell(!await page.isVisible("#panel") && (await focus(page)).id === "list", "Escape closes it, and the list has the focus");
  await press("/");
  await page.keyboard.type(last);
  await page.waitForFunction(() => document.getElementById("count").textContent.includes(" of "));
  await press("Enter");
  tell((await focus(page)).row === last, `typing filters: ${await page.textContent("#count")}`);
  await press("/");
  for (const _ of last) await press("Backspace");
  await listed(page);
}

async function checkNarrow() {
  const visitor = await visit(options.daemon, { viewport: { width: 360, height: 740 } });
  await listed(visitor.page);
  const wide = () => visitor.page.evaluate(() => {
    const all = [...document.querySelectorAll("body *")].filter(one => one.checkVisibility() && !one.closest(".unseen, svg, .who"));
    return Math.max(document.documentElement.scrollWidth, ...all.map(one => Math.round(one.getBoundingClientRect().right)));
  });
  const list = await wide(), rows = await visitor.page.evaluate(() => document.getElementById("rows").clientHeight);
  await checkFrames(visitor, "360 pixels wide");
  await picture(visitor.page, "live-page-narrow");
  await visitor.page.click(".rows .line:not([hidden])");
  await visitor.page.waitForTimeout(1500);
  const panel = await wide();
  tell(list <= 360 && panel <= 360 && rows > 300, `at 360 pixels the list reaches ${list}, an open disk ${panel}; rows have ${rows} of 740`);
  await visitor.context.close();
  return visitor;
}

async function checkGone({ page, context }) {
  await context.route(/\/v1\/|\/metrics/, route => route.abort("connectionrefused"));
  await page.waitForFunction(() => !document.getElementById("banner").hidden, null, { timeout: 20000 });
  const gone = await page.textContent("#banner");
  await context.unroute(/\/v1\/|\/metrics/);
  await page.waitForFunction(() => document.getElementById("banner").classList.contains("fine"), null, { timeout: 20000 });
  tell(gone.startsWith("The daemon does not answer"), `${gone} Then: ${await page.textContent("#banner")}`);
}

async function checkToken() {
  const visitor = await visit(options.locked), { page } = visitor;
  const token = readFileSync(options["token-file"], "utf8").trim();
  await page.waitForSelector("#dialog[open]");
  await page.fill("#token", "this-is-not-the-token");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("token-state").textContent.includes("another"));
  await page.fill("#token", token);
  await page.keyboard.press("Enter");
  await listed(page);
  const spare = (await asked("/v1/disks", token)).find(disk => !disk.exports.length && !disk.jobs.length && !disk["read-only"]);
  if (!spare) throw new Error("--locked: there is no disk without exports and jobs");
  const name = spare["node-name"], before = spare["size-bytes"];
  await page.fill("#filter", name);
  await page.locator(".rows .line:not([hidden]) .who span").getByText(name, { exact: true }).click();
  await page.waitForSelector("#p-changes:not([hidden])");
  tell(true, "a wrong token is refused, the right one shows disks and what can be changed");
  const kept = await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, document.getElementById("token").value]));
  tell(!kept.includes(token), "the token is kept nowhere");
  await page.fill("#f-resize [name=size]", String(before / 2 ** 30 + 1));
  await page.click("#f-resize button");
  await page.waitForFunction(() => document.getElementById("p-result").textContent);
  tell((await page.textContent("#p-result")).endsWith("done."), await page.textContent("#p-result"));
  const after = (await asked("/v1/disks/" + encodeURIComponent(name), token))["size-bytes"];
  tell(after === before + 2 ** 30, `${name} is resized from ${before} to ${after}`);
  await page.fill("#f-resize [name=size]", "1");
  tell(await page.isVisible("#shrinks") && !await page.evaluate(() => document.getElementById("f-resize").checkValidity()), "a smaller size is asked about");
  await page.waitForFunction(() => document.getElementById("p-space").childElementCount > 4, null, { timeout: 20000 });
  const space = await page.getAttribute("#p-parts", "aria-label"), truth = await asked(`/v1/disks/${encodeURIComponent(name)}/space`, token);
  tell(space.includes("Data ") && space.includes("Tables ") && truth["metadata-bytes"] > 0, `where its space goes: ${space}`);
  await page.fill("#f-chain [name=layers]", "7");
  await page.click("#f-chain button");
  await page.waitForFunction(() => document.getElementById("p-chain").textContent.includes("at most 7 layers"), null, { timeout: 20000 });
  await page.fill("#f-chain [name=layers]", "");
  await page.click("#f-chain button");
  await page.waitForFunction(() => document.getElementById("p-chain").hidden, null, { timeout: 20000 });
  tell(true, "a policy of its chain is set, told and taken away");
  await page.click("#f-compact button");
  await page.waitForFunction(() => document.getElementById("p-result").textContent.startsWith("Shorten"), null, { timeout: 10000 });
  tell((await page.textContent("#p-result")).endsWith("done."), await page.textContent("#p-result"));
  while ((await asked("/v1/jobs", token)).some(job => job.id.startsWith("compact-") && job.status !== "concluded")) await page.waitForTimeout(200);
  const { folder } = (await asked("/v1/host", token))["file-systems"][0], overlay = `${folder}/page-check-${Date.now()}.qcow2`;
  await page.fill("#f-snapshot [name=file]", overlay);
  await page.click("#f-snapshot button");
  const overlaid = () => page.waitForFunction(name => document.getElementById("p-name").textContent !== name && document.getElementById("p-layers-text").childElementCount > 2, name, { timeout: 10000 });
  await overlaid().catch(async () => { throw new Error(await page.textContent("#p-result")); });
  const layers = await page.locator("#p-layers-text li").allTextContents();
  tell(layers[0].endsWith(overlay) && layers[1].startsWith(name + ":"), `a snapshot: ${layers.join(" / ")}`);
  const job = page.locator("#jobs .job", { hasText: "page-check" });
  for (const [verb, state] of [["Pause", "paused"], ["Resume", "running"]]) {
    await job.getByRole("button", { name: verb }).click();
    await job.getByText(new RegExp("^" + state)).waitFor({ timeout: 10000 });
  }
  await job.getByRole("button", { name: "Cancel" }).click();
  await job.waitFor({ state: "detached", timeout: 10000 }).catch(() => job.getByText(/^concluded/).waitFor({ timeout: 1000 }));
  tell(true, "a job is paused, resumed and cancelled");
  await visitor.context.close();
  // The browser tells of every refusal: of wrong tokens, and of a disk that was asked for while it became a layer.
  return { ...visitor, said: visitor.said.filter(line => !/status of 40[14]/.test(line)) };
}
async function asked(path, token) {
  const answer = await fetch(options.locked + path, { headers: { authorization: "Bearer " + token } });
  return answer.json();
}

async function picture(page, name) {
  if (!options.pictures) return;
  mkdirSync(options.pictures, { recursive: true });
  await page.screenshot({ path: join(options.pictures, name + ".png") });
}
async function takePictures() {
  const visitors = [];
  for (const colorScheme of ["light", "dark"]) {
    const visitor = await visit(options.daemon, { colorScheme });
    await listed(visitor.page);
    visitors.push([visitor, colorScheme]);
    await visitor.page.selectOption("#sort", "iops");
    const name = options.disk || await visitor.page.textContent(".rows .line .who span");
    await visitor.page.evaluate(name => { location.hash = encodeURIComponent(name); location.reload(); }, name);
    await listed(visitor.page);
    await visitor.page.selectOption("#sort", "iops");
  }
  // The charts have two minutes; so much of them is filled by now.
  await visitors[0][0].page.waitForTimeout(100000);
  for (const [visitor, colorScheme] of visitors) {
    await visitor.page.setViewportSize({ width: 1280, height: 1240 });
    await visitor.page.waitForTimeout(1500);
    await picture(visitor.page, `live-page-disk-${colorScheme}`);
    await visitor.page.setViewportSize({ width: 1280, height: 800 });
    await visitor.page.keyboard.press("Escape");
    await visitor.page.waitForTimeout(200);
    await picture(visitor.page, `live-page-${colorScheme}`);
    await visitor.context.close();
  }
  return visitors.map(([visitor]) => visitor);
}

const main = await visit(options.daemon);
const visitors = [main];
const bytes = options.page ? readFileSync(options.page).length : (await (await fetch(options.daemon + "/")).arrayBuffer()).byteLength;
console.log(`the page has ${bytes} bytes; ${browser.version()}`);
await checkList(main);
await checkFrames(main, "1280 pixels wide");
await checkKeyboard(main);
await checkGone(main);
visitors.push(await checkNarrow());
if (options.locked) visitors.push(await checkToken());
if (options.pictures) visitors.push(...await takePictures());
const strangers = visitors.flatMap(visitor => visitor.strangers);
const said = visitors.flatMap(visitor => visitor.said).filter(line => !line.includes("ERR_CONNECTION_REFUSED"));
tell(!strangers.length, `nothing is asked of anybody else ${strangers.join(" ")}`);
tell(!said.length, `nothing is written to the console ${said.join(" | ")}`);
await browser.close();
process.exitCode = failures ? 1 : 0;
