// The page of an aiograd cluster. No build step: htm and preact come from htm-preact.js.
//
//   server-sent events ─▶ state.history ─▶ App ─▶ one view at a time, chosen by the hash of the URL
//
// Everything shown comes from the cluster, so it is text, never markup: preact escapes it. In a report
// the data is inside the page (`#frozen`), and what would ask the server is left out.
(function () {
  "use strict";
  const { html, render, Component } = window.htmPreact;
  const HISTORY = 300; // digests that are kept: five minutes
  const VIEWS = [
    ["overview", "Overview"], ["calls", "Calls"], ["waits", "Waits"], ["references", "References"],
    ["contexts", "Contexts"], ["logs", "Logs"], ["profile", "Profile"],
  ];
  const COLOURS = ["#4a7fd0", "#3f9a63", "#cf9325", "#9358b5", "#cc5a55", "#31918f", "#8d7d5b", "#66708a"];

  // ── numbers for people ────────────────────────────────────────────────────────────────────────

  const UNIT = "\u00a0"; // a space that does not break: a unit stays with its number
  function bytes(count) {
    if (count === null || count === undefined) return "–";
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (count < 1000) return (unit === "B" || count >= 100 ? count.toFixed(0) : count.toFixed(1)) + UNIT + unit;
      count /= 1000;
    }
    return count.toFixed(1) + UNIT + "TB";
  }
  function seconds(age) {
    if (age === null || age === undefined) return "–";
    if (age < 0.001) return (age * 1e6).toFixed(0) + UNIT + "µs";
    if (age < 0.1) return (age * 1000).toFixed(1) + UNIT + "ms";
    if (age < 100) return age.toFixed(1) + UNIT + "s";
    const minutes = Math.floor(age / 60);
    const [large, small] = minutes < 100 ? [[minutes, "min"], [Math.floor(age % 60), "s"]] : [[Math.floor(minutes / 60), "h"], [minutes % 60, "min"]];
    return [...large, ...small].join(UNIT);
  }
  const percent = (value) => value.toFixed(0) + UNIT + "%";
  const rate = (value) => value.toFixed(value > 0 && value < 10 ? 1 : 0);
  const given = (value) => (value === null || value === undefined || value === "" ? "–" : value);
  const many = (count, word) => count + " " + word + (count === 1 ? "" : "s");
  const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const inOrder = (a, b) => a.localeCompare(b, "en", { numeric: true }); // worker2 before worker10
  const line = (text) => (text ? text.split("/").slice(-2).join("/") : "");
  const colour = (text) => {
    let hash = 0;
    for (const letter of text) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
    return COLOURS[hash % COLOURS.length];
  };

  // ── rates: what has changed between two digests ───────────────────────────────────────────────

  // What is kept of digests that are not the last one: a page may be open for hours.
  const pick = (row, keys) => Object.fromEntries(keys.map((key) => [key, row[key]]));
  const slim = (digest) => ({
    taken: digest.taken,
    workers: digest.workers.map((row) => pick(row, ["name", "incarnation", "cpu", "started", "sent", "received", "lag", "memory"])),
    calls: digest.calls.map((call) => pick(call, ["key", "callee", "function", "state", "age"])),
  });

  function rates(history, name) {
    const found = [];
    let before = null;
    for (const digest of history.slice(-61)) {
      const row = (digest.workers || []).find((each) => each.name === name);
      if (row && before && row.incarnation === before.row.incarnation && digest.taken > before.taken) {
        const passed = digest.taken - before.taken;
        const rate = (key) => Math.max(0, (row[key] - before.row[key]) / passed);
        found.push({ taken: digest.taken, cpu: rate("cpu"), calls: rate("started"), sent: rate("sent"), received: rate("received"), lag: row.lag || 0, memory: row.memory || 0 });
      }
      before = row && row.cpu !== null ? { row, taken: digest.taken } : null;
    }
    return found;
  }

  // ── small parts ───────────────────────────────────────────────────────────────────────────────

  const State = ({ of }) => html`<span class=${"state " + of}>${of}</span>`;

  // `floor`: what counts as much at least, so that noise near zero does not look like load.
  function Spark({ points, label, show, floor }) {
    const width = 120, height = 24;
    const last = points.slice(-60);
    if (last.length < 2) return html`<span class="quiet">–</span>`;
    const top = Math.max(...last), most = Math.max(top, floor || 1e-9);
    const path = last.map((value, i) => (i ? "L" : "M") + ((i / (last.length - 1)) * width).toFixed(1) + " " + (height - 2 - (value / most) * (height - 4)).toFixed(1)).join("");
    const now = show(last[last.length - 1]);
    return html`<span class="row"><svg width=${width} height=${height} viewBox=${"0 0 " + width + " " + height} role="img" aria-label=${label + ": now " + now + ", at most " + show(top)}><path class="spark" d=${path}/></svg><span>${now}</span></span>`;
  }

  // A table that can be sorted by its heads. Columns: [key, title, how to show, number?, narrow-hide?]
  class Table extends Component {
    constructor() { super(); this.state = { by: null, down: true }; }
    render({ columns, rows, caption, empty, id }, { by, down }) {
      let shown = rows;
      if (by !== null) {
        shown = [...rows].sort((a, b) => {
          const x = a[by], y = b[by];
          const order = x === y ? 0 : x === null || x === undefined ? -1 : y === null || y === undefined ? 1 : x < y ? -1 : 1;
          return down ? -order : order;
        });
      }
      if (!rows.length) return html`<p class="quiet">${empty}</p>`;
      const classes = ([, , , number, hide]) => (number ? "n " : "") + (hide ? "narrow-hide" : "");
      return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table data-table=${id}>
        <caption>${caption}</caption>
        <thead><tr>${columns.map((column) => html`<th scope="col" class=${classes(column)} aria-sort=${by === column[0] ? (down ? "descending" : "ascending") : "none"}>
          <button type="button" onClick=${() => this.setState({ by: column[0], down: by === column[0] ? !down : true })}>${column[1]}${by === column[0] ? (down ? " ▾" : " ▴") : ""}</button></th>`)}</tr></thead>
        <tbody>${shown.map((row) => html`<tr key=${row.key || row.id || row.name}>${columns.map((column) => html`<td class=${classes(column)}>${column[2] ? column[2](row[column[0]], row) : row[column[0]]}</td>`)}</tr>`)}</tbody>
      </table></div>`;
    }
  }

  // ── overview ──────────────────────────────────────────────────────────────────────────────────

  function Overview({ now, history, frozen }) {
    const workers = now.workers;
    const well = workers.filter((row) => row.state === "running" || row.state === "hidden").length;
    const byName = Object.fromEntries(workers.map((row) => [row.name, rates(history, row.name)]));
    const sum = (key) => workers.reduce((total, row) => { const r = byName[row.name]; return total + (r.length ? r[r.length - 1][key] : 0); }, 0);
    const rows = workers.map((row) => ({ ...row, key: row.name, values: row.counters.owner_rrefs }));
    const troubled = workers.filter((row) => row.state !== "running" && row.state !== "hidden");
    const versions = {};
    for (const row of workers) for (const name of ["aiograd", "python", "numpy", "wire"]) if (row.versions[name]) (versions[name] = versions[name] || new Set()).add(row.versions[name]);
    const differ = Object.entries(versions).filter(([, set]) => set.size > 1).map(([name, set]) => name + " " + [...set].join(", "));
    const limits = workers.flatMap((row) => Object.entries(row.limits).map(([name, count]) => row.name + ": " + name + " ×" + count));
    return html`
      <div class="tiles">
        <div class="tile"><span class="quiet">workers</span><b>${well} of ${workers.length}</b></div>
        <div class="tile"><span class="quiet">calls under way</span><b>${now.call_count}</b></div>
        <div class="tile"><span class="quiet">calls per second</span><b>${rate(sum("calls"))}</b></div>
        <div class="tile"><span class="quiet">sent per second</span><b>${bytes(sum("sent"))}</b></div>
        <div class="tile"><span class="quiet">shared values</span><b>${now.reference_count}</b><span class="quiet">${bytes(now.reference_bytes)}</span></div>
        <div class="tile"><span class="quiet">contexts</span><b>${now.context_count}</b></div>
      </div>
      ${troubled.map((row) => html`<div class=${"notice" + (row.state === "lost" ? " bad" : "")} role="alert"><b>${row.name} is ${row.state}.</b> ${row.why} ${row.at ? html`<code>${row.at}</code>` : ""}</div>`)}
      ${differ.length ? html`<div class="notice">Versions differ: ${differ.join("; ")}</div>` : ""}
      ${limits.length ? html`<div class="notice">Limits reached: ${limits.join("; ")}</div>` : ""}
      <section aria-labelledby="workers"><h2 id="workers">Workers</h2>
        <${Table} id="workers" caption=${many(workers.length, "worker") + ", as " + now.by + " sees them"} empty="There are no workers." rows=${rows} columns=${[
          ["name", "worker", (name, row) => html`<a href=${"#/worker/" + encodeURIComponent(name)}>${name}</a>${row.coordinator ? html` <span class="quiet" title="coordinator">★<span class="skip">coordinator</span></span>` : ""}`],
          ["rank", "rank", null, true, true],
          ["state", "state", (state) => html`<${State} of=${state}/>`],
          ["pid", "process", (pid, row) => (pid ? row.host + ":" + pid : "–"), false, true],
          ["cpu", "processor", (_, row) => html`<${Spark} label=${row.name + " processor"} points=${byName[row.name].map((r) => r.cpu * 100)} floor=${20} show=${percent}/>`, false, true],
          ["memory", "memory", bytes, true],
          ["lag", "lag", seconds, true],
          ["sent", "out", (_, row) => html`<${Spark} label=${row.name + " bytes out per second"} points=${byName[row.name].map((r) => r.sent)} show=${(v) => bytes(v) + "/s"}/>`, false, true],
          ["calling", "calling", given, true], ["called", "called", given, true], ["values", "values", given, true],
        ]}/></section>`;
  }

  // ── one worker ────────────────────────────────────────────────────────────────────────────────

  class Worker extends Component {
    constructor() { super(); this.state = { stacks: null, busy: false }; }
    async load(name) {
      this.setState({ busy: true });
      try {
        const answer = await fetch("stacks.json?worker=" + encodeURIComponent(name));
        const found = answer.ok ? (await answer.json())[name] : await answer.text();
        this.setState({ stacks: found, busy: false });
      } catch (error) { this.setState({ stacks: String(error), busy: false }); }
    }
    render({ now, history, name, frozen }, { stacks, busy }) {
      const row = now.workers.find((each) => each.name === name);
      if (!row) return html`<section><p>There is no worker ${name} now.</p></section>`;
      const series = rates(history, name);
      const lines = [["processor", series.map((r) => r.cpu * 100), percent, 20], ["memory", series.map((r) => r.memory), bytes], ["lag of the loop", series.map((r) => r.lag), seconds, 0.005], ["calls made per second", series.map((r) => r.calls), rate], ["bytes out per second", series.map((r) => r.sent), bytes], ["bytes in per second", series.map((r) => r.received), bytes]];
      return html`<section aria-labelledby="w"><h2 id="w">${name} <${State} of=${row.state}/></h2>
          ${row.why ? html`<p class="notice">${row.why}</p>` : ""}
          ${row.stack.length ? html`<h3>Where its event loop is blocked</h3><pre>${row.stack.join("\n")}</pre>` : ""}
          <table class="facts"><caption class="skip">Numbers of ${name}</caption><tbody>
            ${lines.map(([title, points, show, floor]) => html`<tr><th scope="row">${title}</th><td><${Spark} label=${title} points=${points} show=${show} floor=${floor}/></td></tr>`)}
            ${[["process", row.pid ? row.host + ":" + row.pid : "–"], ["rank", row.rank], ["threads", given(row.threads)], ["open links", row.links], ["round trip", seconds(row.round_trip)], ["started", row.age === null ? "–" : seconds(row.age) + " ago"], ["versions", given(Object.entries(row.versions).map(([k, v]) => k + " " + v).join(", "))], ["silent peers", row.suspects.join(", ") || "none"]].map(([title, text]) => html`<tr><th scope="row">${title}</th><td class="wrap">${text}</td></tr>`)}
          </tbody></table>
          ${frozen ? "" : html`<p><button class="act" type="button" disabled=${busy} onClick=${() => this.load(name)}>${busy ? "asking …" : "Show stacks"}</button></p>`}
          ${stacks ? (typeof stacks === "string" ? html`<p>${stacks}</p>` : stacks.map((each) => html`<h3>${each.kind} ${each.name}</h3><pre>${each.stack.join("\n")}</pre>`)) : ""}
        </section>`;
    }
  }

  // ── calls ─────────────────────────────────────────────────────────────────────────────────────

  // How wide a timeline is drawn: in a narrow window it has less room, not smaller letters.
  const room = () => (window.innerWidth < 700 ? { left: 78, width: Math.max(300, window.innerWidth - 60) } : { left: 110, width: 900 });

  // Bars of calls that were seen in the last minute: one lane per worker, more where calls overlap.
  function Timeline({ history, now }) {
    const span = 60, end = now.taken, begin = end - span;
    const seen = new Map(), all = [];
    for (const digest of history) {
      if (digest.taken < begin - 5) continue;
      for (const call of digest.calls || []) {
        if (call.state === "sent" || call.state === "waiting" || call.age === null) continue;
        const start = digest.taken - call.age;
        // The same call as in the digest before; not one of a restarted worker, which begins its numbers anew.
        const known = seen.get(call.key);
        if (known && Math.abs(known.began - start) < 3) { known.end = digest.taken; continue; }
        const made = { worker: call.callee, name: call.function, began: start, start: Math.max(start, begin), end: digest.taken };
        seen.set(call.key, made);
        all.push(made);
      }
    }
    const bars = all.filter((bar) => bar.end > begin).sort((a, b) => a.start - b.start);
    if (!bars.length) return html`<p class="quiet">No call was seen in the last minute. Calls are looked at once a second: shorter ones are in the numbers of the overview.</p>`;
    const lanes = new Map();
    for (const bar of bars) {
      const rows = lanes.get(bar.worker) || [];
      let row = rows.findIndex((last) => last <= bar.start);
      if (row < 0) row = rows.length < 8 ? rows.push(0) - 1 : 7;
      rows[row] = bar.end;
      bar.row = row;
      lanes.set(bar.worker, rows);
    }
    const { left, width } = room(), bar = 14;
    let y = 4;
    const tops = new Map();
    for (const [worker, rows] of [...lanes].sort((a, b) => inOrder(a[0], b[0]))) { tops.set(worker, y); y += rows.length * (bar + 2) + 8; }
    const x = (time) => left + ((time - begin) / span) * (width - left);
    return html`<div class="scroll" tabindex="0" role="region" aria-label="timeline"><svg class="wide" width=${width} height=${y + 18} viewBox=${"0 0 " + width + " " + (y + 18)} role="img" aria-label=${bars.length + " calls on " + lanes.size + " workers in the last minute"}>
      ${[...tops].map(([worker, top]) => html`<g><rect class="lane" x=${left} y=${top} width=${width - left} height=${lanes.get(worker).length * (bar + 2) + 4} rx="4"/><text x=${left - 8} y=${top + 13} text-anchor="end">${short(worker, left < 100 ? 9 : 14)}</text></g>`)}
      ${[0, 15, 30, 45, 60].map((ago) => html`<g><line class="grid" x1=${x(end - ago)} x2=${x(end - ago)} y1="0" y2=${y}/><text class="quiet" x=${x(end - ago)} y=${y + 14} text-anchor=${ago === 60 ? "start" : ago ? "middle" : "end"}>${ago ? "−" + ago + " s" : "now"}</text></g>`)}
      ${bars.map((each) => html`<rect x=${x(each.start)} y=${tops.get(each.worker) + 2 + each.row * (bar + 2)} width=${Math.max(2, x(each.end) - x(each.start))} height=${bar} rx="3" fill=${colour(each.name)}><title>${each.name} on ${each.worker}: ${seconds(each.end - each.start)}</title></rect>`)}
    </svg></div>`;
  }

  class Calls extends Component {
    constructor() { super(); this.state = { filter: "" }; }
    render({ now, history }, { filter }) {
      const wanted = filter.toLowerCase();
      const rows = now.calls.filter((call) => !wanted || [call.function, call.caller, call.callee, call.line, call.at].some((text) => (text || "").toLowerCase().includes(wanted)));
      const cut = now.call_count > now.calls.length ? ", the oldest " + now.calls.length + " are shown" : "";
      return html`<section aria-labelledby="tl"><h2 id="tl">The last minute</h2><${Timeline} history=${history} now=${now}/></section>
        <section aria-labelledby="cs"><h2 id="cs">Calls under way</h2>
        <p class="row"><label for="filter">Filter</label><input id="filter" type="search" value=${filter} onInput=${(event) => this.setState({ filter: event.target.value })}/></p>
        <${Table} id="calls" caption=${many(now.call_count, "call") + cut} empty="No call is under way." rows=${rows} columns=${[
          ["function", "function", (name) => html`<code>${name}</code>`], ["callee", "on"], ["caller", "for"],
          ["state", "state", (state) => html`<${State} of=${state}/>`],
          ["age", "age", seconds, true], ["budget", "budget", (left) => (left === null ? "none" : seconds(left)), true, true],
          ["line", "made at", (text) => html`<code title=${text}>${line(text)}</code>`, false, true],
          ["at", "is at", (text) => html`<code title=${text}>${line(text)}</code>`],
          ["parent", "made by", (key) => key || "", false, true],
        ]}/></section>`;
    }
  }

  // ── waits ─────────────────────────────────────────────────────────────────────────────────────

  // The head of an arrow; as large on thick lines as on thin ones.
  const Tip = ({ id, kind }) => html`<marker id=${id} viewBox="0 0 8 8" refX="7" refY="4" markerWidth="10" markerHeight="10" markerUnits="userSpaceOnUse" orient="auto"><path class=${"tip " + kind} d="M0 1L7 4L0 7z"/></marker>`;

  function Ring({ now }) {
    const names = now.workers.map((row) => row.name);
    const guilty = new Set(now.findings.filter((each) => each.kind === "cycle").flatMap((each) => each.hops.map((hop) => hop.worker)));
    if (!now.edges.length) return html`<p class="quiet">Nobody waits for anybody.</p>`;
    const size = 460, middle = size / 2, radius = 165;
    const place = Object.fromEntries(names.map((name, i) => { const angle = (2 * Math.PI * i) / names.length - Math.PI / 2; return [name, [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)]]; }));
    const state = Object.fromEntries(now.workers.map((row) => [row.name, row.state]));
    const paint = { running: "#3f9a63", hidden: "#31918f", blocked: "#cf9325", stopped: "#cf9325", silent: "#cf9325", lost: "#cc5a55" };
    return html`<svg class="ring" width=${size} height=${size} viewBox=${"0 0 " + size + " " + size} role="img" aria-label=${"who waits for whom: " + now.edges.slice(0, 20).map((e) => e.from + " for " + e.to).join(", ")}>
      <defs>${["", "bad"].map((kind) => html`<${Tip} id=${"tip" + kind} kind=${kind}/>`)}</defs>
      ${now.edges.filter((edge) => place[edge.from] && place[edge.to]).map((edge) => {
        const [a, b] = place[edge.from], [c, d] = place[edge.to];
        const own = edge.from === edge.to;
        const length = Math.hypot(c - a, d - b) || 1;
        const ux = (c - a) / length, uy = (d - b) / length;
        const path = own ? "M" + (a - 6) + " " + (b - 8) + "c-24 -34 36 -34 12 0" : "M" + (a + ux * 12) + " " + (b + uy * 12) + "Q" + ((a + c) / 2 - uy * 22) + " " + ((b + d) / 2 + ux * 22) + " " + (c - ux * 14) + " " + (d - uy * 14);
        const bad = guilty.has(edge.from) && guilty.has(edge.to) ? "bad" : "";
        return html`<path class=${"edge " + bad} d=${path} stroke-width=${Math.min(5, 1 + Math.log2(edge.count + 1))} marker-end=${"url(#tip" + bad + ")"}><title>${edge.from} waits for ${edge.count} calls on ${edge.to}, the oldest ${seconds(edge.oldest)}</title></path>`;
      })}
      ${names.map((name) => { const [x, y] = place[name]; const left = x < middle - 5, right = x > middle + 5; return html`<g><circle class="dot" cx=${x} cy=${y} r=${names.length <= 24 ? 9 : 6} fill=${paint[state[name]] || "#8b93a1"}><title>${name}: ${state[name]}</title></circle>${names.length <= 24 ? html`<text x=${x + (right ? 14 : left ? -14 : 0)} y=${y + (right || left ? 4 : y < middle ? -14 : 24)} text-anchor=${right ? "start" : left ? "end" : "middle"}>${short(name, 14)}</text>` : ""}</g>`; })}
    </svg>`;
  }

  function Waits({ now }) {
    return html`<section aria-labelledby="st"><h2 id="st">Why it does not go on</h2>
        ${now.findings.length ? "" : html`<p class="notice good">Nothing waits for longer than five seconds.</p>`}
        ${now.findings.map((each) => html`<div class="finding"><p><${State} of=${each.kind}/> <b>${each.title}</b> <span class="quiet">${seconds(each.age)}</span></p>
          <div class="scroll" tabindex="0" role="region" aria-label=${each.title}><table class="hops"><thead><tr><th scope="col">worker</th><th scope="col">function</th><th scope="col">line</th><th scope="col" class="n">since</th><th scope="col"></th></tr></thead><tbody>
          ${each.hops.map((hop) => html`<tr><td>${hop.worker}</td><td><code>${hop.function || "–"}</code></td><td><code title=${hop.line}>${line(hop.line) || "?"}</code></td><td class="n">${seconds(hop.age)}</td><td>${hop.note}</td></tr>`)}
          ${each.hop_count > each.hops.length ? html`<tr><td colspan="5" class="quiet">and ${each.hop_count - each.hops.length} more</td></tr>` : ""}
          </tbody></table></div></div>`)}
      </section>
      <section aria-labelledby="ring"><h2 id="ring">Who waits for whom</h2><${Ring} now=${now}/></section>
      ${now.collectives.length ? html`<section><h2>Barriers and gathers</h2>${now.collectives.map((each) => html`<p>${each.group.join(", ")}: <b>${each.missing.join(", ")}</b> missing, since ${seconds(each.age)}</p>`)}</section>` : ""}`;
  }

  // ── references, contexts ──────────────────────────────────────────────────────────────────────

  function References({ now }) {
    const rows = now.references.map((row, i) => ({ ...row, key: row.owner + row.line + row.type + i, held: Object.entries(row.holders).map(([name, count]) => name + " ×" + count).join(", ") }));
    return html`<section aria-labelledby="rf"><h2 id="rf">References by owner and line</h2>
      <${Table} id="references" caption=${many(now.reference_count, "value") + ", " + bytes(now.reference_bytes)} empty="No value is shared." rows=${rows} columns=${[
        ["owner", "owner"], ["line", "made at", (text) => html`<code title=${text}>${line(text) || "?"}</code>`], ["type", "type", (text) => html`<code>${text}</code>`, false, true],
        ["count", "values", null, true], ["size", "bytes", bytes, true], ["state", "state", (state) => html`<${State} of=${state}/>`, false, true], ["held", "held by"],
      ]}/></section>`;
  }

  // One backward pass: a box per worker with its state, and the edges between them. Gradients flow
  // against the arrows of the forward pass: an edge is grey until the pass reaches its sender, moves while
  // its answer is awaited, and is green when it has come.
  function Pass({ context, number, now }) {
    const rows = Object.fromEntries(context.passes.filter((each) => each.number === number).map((each) => [each.worker, each]));
    const parts = Object.fromEntries(context.parts.map((each) => [each.worker, each]));
    const health = Object.fromEntries(now.workers.map((row) => [row.name, row.state]));
    const edges = context.parts.flatMap((part) => Object.entries(part.edges || {}).filter(([peer]) => peer !== part.worker).map(([peer, count]) => ({ from: part.worker, to: peer, count })));
    const names = [...new Set([...Object.keys(parts), ...edges.map((edge) => edge.to), ...Object.keys(rows)])];
    const known = Object.values(rows)[0];
    const first = known ? known.originator : context.opened_by;
    // Columns by distance from the worker that began the pass; a full column goes on in the next one.
    const depth = { [first]: 0 };
    for (let reached = [first]; reached.length;) {
      const next = [];
      for (const edge of edges) for (const [a, b] of [[edge.from, edge.to], [edge.to, edge.from]]) if (reached.includes(a) && depth[b] === undefined) { depth[b] = depth[a] + 1; next.push(b); }
      reached = next;
    }
    const tight = window.innerWidth < 700;
    const most = 12, width = tight ? 128 : 168, height = 52, across = tight ? 200 : 290, down = 72;
    const columns = [], far = (name) => (depth[name] === undefined ? 99 : depth[name]);
    for (const name of names.sort((a, b) => far(a) - far(b) || inOrder(a, b))) {
      const last = columns[columns.length - 1];
      if (last && last.depth === depth[name] && last.names.length < most) last.names.push(name); else columns.push({ depth: depth[name], names: [name] });
    }
    const state = (name) => {
      if (health[name] && health[name] !== "running" && health[name] !== "hidden") return [health[name], "is " + health[name]];
      const row = rows[name];
      if (row) return row.state === "computing" ? ["computing", "computes"] : row.state === "complete" ? ["complete", "has done its part"] : ["waiting", "waits for " + waits(row.waits_for)];
      if (parts[name] && parts[name].failed && !known) return ["failed", "the pass failed"];
      return known ? ["unreached", "not reached yet"] : ["idle", "no pass"];
    };
    // A crowd is a grid without edges, which nobody could tell apart; who has done its part comes last.
    const crowd = names.length > 16;
    if (crowd) {
      const order = ["lost", "stopped", "blocked", "silent", "failed", "computing", "waiting", "unreached", "idle", "complete"];
      names.sort((a, b) => order.indexOf(state(a)[0]) - order.indexOf(state(b)[0]) || inOrder(a, b));
      const room = Math.max(2, Math.floor((Math.min(window.innerWidth, 1500) - 60) / (width + 14)));
      columns.splice(0, columns.length, ...Array.from({ length: Math.min(room, names.length) }, (_, i) => ({ names: names.filter((_, j) => j % room === i) })));
      edges.length = 0;
    }
    const tall = Math.max(1, ...columns.map((column) => column.names.length));
    const place = {}, step = crowd ? width + 14 : across, next = crowd ? height + 10 : down;
    columns.forEach((column, i) => column.names.forEach((name, j) => { place[name] = [8 + i * step, 22 + (j + (crowd ? 0 : (tall - column.names.length) / 2)) * next]; }));
    const flow = (edge) => {
      const row = rows[edge.from];
      if (!row || row.state === "computing") return ["", 0];
      const awaited = row.waits_for[edge.to] || 0;
      return awaited ? ["awaited", awaited] : ["answered", 0];
    };
    // Each end of an edge has a place of its own at the side of its box, in the order of what it leads to.
    const ends = {};
    for (const edge of edges) {
      const [from, to] = [place[edge.from], place[edge.to]];
      const side = (self, other) => (self[0] < other[0] ? "right" : self[0] > other[0] ? "left" : "right");
      edge.sides = [side(from, to), side(to, from)];
      for (const [name, i, other] of [[edge.from, 0, to], [edge.to, 1, from]]) (ends[name + edge.sides[i]] = ends[name + edge.sides[i]] || []).push({ edge, i, y: other[1], x: other[0] });
    }
    for (const list of Object.values(ends)) {
      list.sort((a, b) => a.y - b.y || a.x - b.x || a.edge.from.localeCompare(b.edge.from));
      list.forEach((end, j) => { (end.edge.ports = end.edge.ports || [])[end.i] = ((j + 1) / (list.length + 1)) * height; });
    }
    const loops = edges.some((edge) => place[edge.from][0] === place[edge.to][0]);
    const wide = (columns.length - 1) * step + width + (loops ? 76 : 16), high = tall * next + 30;
    const end = (edge, i) => { const [x, y] = place[i ? edge.to : edge.from]; return [x + (edge.sides[i] === "right" ? width : 0), y + edge.ports[i], edge.sides[i] === "right" ? 1 : -1]; };
    const about = names.map((name) => name + " " + state(name)[1]).join(", ");
    return html`<div class="scroll" tabindex="0" role="region" aria-label=${"the pass of context " + context.id}><svg class="pass" width=${wide} height=${high} viewBox=${"0 0 " + wide + " " + high} role="img" aria-label=${about}>
      <defs>${["", "awaited", "answered"].map((kind) => html`<${Tip} id=${"to" + kind} kind=${kind}/>`)}</defs>
      ${edges.map((edge) => {
        const [kind, awaited] = flow(edge);
        // Forward edges point to the receiver; the gradients of awaited and answered ones to the sender.
        const [[a, b, out], [c, d, into]] = kind ? [end(edge, 1), end(edge, 0)] : [end(edge, 0), end(edge, 1)];
        // Over the boxes in between, if it goes past a column.
        const over = Math.abs(c - a) > across ? Math.min(b, d) - down + 10 : null;
        const path = "M" + a + " " + b + "C" + (a + out * 48) + " " + (over === null ? b : over) + " " + (c + into * 48) + " " + (over === null ? d : over) + " " + c + " " + d;
        const words = edge.from + " → " + edge.to + ": " + many(edge.count, "edge") + (kind === "awaited" ? ", " + awaited + " of them awaited" : kind === "answered" ? ", answered" : "");
        return html`<g key=${edge.from + ">" + edge.to}><path class=${"edge " + kind} data-edge=${edge.from + ">" + edge.to} d=${path} marker-end=${"url(#to" + kind + ")"}><title>${words}</title></path>
          ${edge.count > 1 && over === null ? html`<text class="quiet small" x=${(a + c) / 2 + (out === into ? 40 * out : 0)} y=${(b + d) / 2 - 5} text-anchor="middle">${kind === "awaited" ? awaited + " of " + edge.count : edge.count}</text>` : ""}</g>`;
      })}
      ${names.map((name) => { const [x, y] = place[name]; const [kind, words] = state(name); return html`<g key=${name} data-worker=${name} data-state=${kind}><title>${name} ${words}</title>
        <rect class=${"part " + kind} x=${x} y=${y} width=${width} height=${height} rx="9"/>
        <text class="strong" x=${x + 12} y=${y + 22}>${short(name, tight ? 13 : 18)}${name === first ? " ★" : ""}</text>
        <text class="quiet" x=${x + 12} y=${y + 39}>${short(words, tight ? 17 : 24)}</text></g>`; })}
    </svg></div>`;
  }

  function waits(counts) {
    const names = Object.keys(counts);
    return !names.length ? "the end" : names.length === 1 ? names[0] : names.length + " workers";
  }

  // The graph of operations as the server draws it: again every two seconds, or more rarely if that takes long.
  class Graph extends Component {
    constructor() { super(); this.state = { source: "", why: "" }; this.gone = false; }
    componentDidMount() { this.load(); }
    componentWillUnmount() { this.gone = true; clearTimeout(this.timer); URL.revokeObjectURL(this.state.source); }
    async load() {
      const began = performance.now();
      try {
        const answer = await fetch("graph.json?context=" + this.props.id);
        const found = answer.ok ? await answer.json() : { why: await answer.text() };
        if (this.gone) return;
        const before = this.state.source;
        this.setState({ source: found.svg ? URL.createObjectURL(new Blob([found.svg], { type: "image/svg+xml" })) : "", why: found.why || "" });
        setTimeout(() => URL.revokeObjectURL(before), 1000); // when the next one is shown
      } catch (error) { this.setState({ why: String(error) }); }
      if (!this.gone) this.timer = setTimeout(() => this.load(), Math.max(2000, 10 * (performance.now() - began)));
    }
    render({ id }, { source, why }) {
      return html`<h3>Graph</h3>${source ? html`<div class="scroll" tabindex="0" role="region" aria-label="graph"><img class="graph" alt=${"the distributed graph of context " + id} src=${source}/></div>` : html`<p class="quiet">${why || "…"}</p>`}`;
    }
  }

  class Contexts extends Component {
    constructor() { super(); this.state = { chosen: null }; }
    render({ now, frozen }, { chosen }) {
      const rows = now.contexts.map((each) => ({ ...each, key: each.id, workers: each.parts.map((part) => part.worker).join(", "), edges: each.parts.reduce((sum, part) => sum + part.sends, 0), running: new Set(each.passes.map((pass) => pass.number)).size, failed: each.parts.map((part) => part.failed).find(Boolean) || "" }));
      // What was chosen, while it is there; else one in which something happens.
      const context = now.contexts.find((each) => each.id === chosen) || now.contexts.find((each) => each.passes.length) || now.contexts[0];
      const numbers = context ? [...new Set(context.passes.map((each) => each.number))].slice(0, 3) : [];
      return html`<section aria-labelledby="cx"><h2 id="cx">Contexts</h2>
        <${Table} id="contexts" caption=${many(now.context_count, "context")} empty="No context is open." rows=${rows} columns=${[
          ["id", "context", (id) => html`<button class="act" type="button" aria-pressed=${context && context.id === id ? "true" : "false"} onClick=${() => this.setState({ chosen: id })}>${id}</button>`],
          ["opened_by", "opened by"], ["workers", "workers", (text) => html`<span class="cut" title=${text}>${text}</span>`], ["edges", "edges", null, true], ["running", "passes", null, true], ["failed", "last failure", (text) => html`<span class="wrap">${text}</span>`, false, true],
        ]}/></section>
        ${context ? html`<section aria-labelledby="ps"><h2 id="ps">Context ${context.id}</h2>
          ${context.parts.filter((part) => part.failed).slice(0, 1).map((part) => html`<p class="notice bad">${part.failed}</p>`)}
          ${(numbers.length ? numbers : [null]).map((number) => html`<${Pass} key=${number} context=${context} number=${number} now=${now}/>`)}
          <${Table} id="passes" caption="backward passes under way" empty="No backward pass is under way." rows=${context.passes.map((each) => ({ ...each, key: each.worker + each.number, waits: Object.entries(each.waits_for).map(([name, count]) => name + " (" + count + ")").join(", ") }))} columns=${[
            ["worker", "worker"], ["state", "state", (state) => html`<${State} of=${state}/>`], ["waits", "waits for edges of"], ["originator", "begun by"], ["age", "since", seconds, true], ["line", "awaited at", (text) => html`<code title=${text}>${line(text)}</code>`],
          ]}/>
          ${frozen ? "" : html`<${Graph} key=${context.id} id=${context.id}/>`}
        </section>` : ""}`;
    }
  }

  // ── logs, profile ─────────────────────────────────────────────────────────────────────────────

  class Logs extends Component {
    constructor(props) { super(props); this.state = { lines: [], worker: "", filter: "", error: "" }; this.seen = {}; }
    componentDidMount() {
      if (this.props.frozen) { this.take(this.props.frozen.logs); return; }
      this.poll();
      this.timer = setInterval(() => this.poll(), 1000);
    }
    componentWillUnmount() { clearInterval(this.timer); }
    take(found) {
      const fresh = [];
      for (const [worker, [count, lines]] of Object.entries(found)) { this.seen[worker] = count; for (const text of lines) fresh.push({ worker, text }); }
      if (fresh.length) this.setState({ lines: [...this.state.lines, ...fresh].slice(-2000) });
    }
    async poll() {
      try {
        const answer = await fetch("logs.json?after=" + encodeURIComponent(JSON.stringify(this.seen)));
        if (answer.ok) { this.take(await answer.json()); this.setState({ error: "" }); } else this.setState({ error: await answer.text() });
      } catch (error) { this.setState({ error: String(error) }); }
    }
    render({ now }, { lines, worker, filter, error }) {
      const shown = lines.filter((each) => (!worker || each.worker === worker) && (!filter || each.text.toLowerCase().includes(filter.toLowerCase()))).slice(-500);
      const names = [...new Set([...now.workers.map((row) => row.name), ...lines.map((each) => each.worker)])];
      return html`<section aria-labelledby="lg"><h2 id="lg">What workers have written</h2>
        <p class="row"><label for="lw">Worker</label><select id="lw" value=${worker} onChange=${(event) => this.setState({ worker: event.target.value })}><option value="">all</option>${names.map((name) => html`<option value=${name}>${name}</option>`)}</select>
        <label for="lf">Filter</label><input id="lf" type="search" value=${filter} onInput=${(event) => this.setState({ filter: event.target.value })}/></p>
        ${error ? html`<p class="notice">${error}</p>` : ""}
        ${shown.length ? html`<div class="scroll" tabindex="0" role="log" aria-label="output of workers"><pre>${shown.map((each) => "[" + each.worker + "] " + each.text).join("\n")}</pre></div>` : html`<p class="quiet">Nothing was written. The output of workers is kept where it is forwarded: in local clusters.</p>`}
      </section>`;
    }
  }

  class Profile extends Component {
    constructor() { super(); this.state = { found: null, busy: false, seconds: 5, error: "" }; }
    async record() {
      this.setState({ busy: true, error: "" });
      try {
        const answer = await fetch("record.json?seconds=" + this.state.seconds);
        if (answer.ok) this.setState({ found: await answer.json(), busy: false }); else this.setState({ error: await answer.text(), busy: false });
      } catch (error) { this.setState({ error: String(error), busy: false }); }
    }
    render({ frozen }, { found, busy, seconds: length, error }) {
      if (frozen) return html`<section><h2>Profile</h2><p class="quiet">A report has no recording: use <code>aiograd record 10s -o report.html</code>.</p></section>`;
      return html`<section aria-labelledby="pf"><h2 id="pf">What is called</h2>
        <p class="row"><label for="sec">Record for</label><select id="sec" value=${length} onChange=${(event) => this.setState({ seconds: Number(event.target.value) })}>${[1, 5, 15, 60].map((each) => html`<option value=${each}>${each} s</option>`)}</select>
        <button class="act" type="button" disabled=${busy} onClick=${() => this.record()}>${busy ? "recording …" : "Record"}</button><span class="quiet">Calls cost more while they are recorded.</span></p>
        <p role="status">${busy ? "recording for " + length + " s" : found ? found.count + " spans in " + found.seconds + " s" : ""}</p>
        ${error ? html`<p class="notice">${error}</p>` : ""}
        ${found ? html`${Object.entries(found.silent).map(([name, why]) => html`<p class="notice">${name} gave none: ${why}</p>`)}
          <${Bars} found=${found}/>
          <${Table} id="profile" caption="time by function and worker" empty="No call began and ended meanwhile." rows=${found.rows.map((row) => ({ ...row, key: row.name + row.worker, mean: row.total / row.count }))} columns=${[
            ["name", "function", (name) => html`<code>${name}</code>`], ["worker", "worker"], ["count", "calls", null, true], ["total", "total", seconds, true], ["mean", "mean", seconds, true, true], ["max", "longest", seconds, true],
          ]}/>` : ""}</section>`;
    }
  }

  function Bars({ found }) {
    if (!found.bars.length) return "";
    const { left, width } = room(), height = 16;
    const workers = [...new Set(found.bars.map((bar) => bar[0]))].sort(inOrder);
    const end = Math.max(...found.bars.map((bar) => bar[3]), 1e-9);
    const x = (time) => left + (time / end) * (width - left);
    return html`<div class="scroll" tabindex="0" role="region" aria-label="recorded spans"><svg class="wide" width=${width} height=${workers.length * 22 + 20} viewBox=${"0 0 " + width + " " + (workers.length * 22 + 20)} role="img" aria-label=${found.bars.length + " spans on " + workers.length + " workers"}>
      ${workers.map((worker, i) => html`<g><rect class="lane" x=${left} y=${i * 22} width=${width - left} height=${height + 4} rx="4"/><text x=${left - 8} y=${i * 22 + 14} text-anchor="end">${short(worker, left < 100 ? 9 : 14)}</text></g>`)}
      ${found.bars.map(([worker, name, start, stop]) => html`<rect x=${x(start)} y=${workers.indexOf(worker) * 22 + 2} width=${Math.max(1, x(stop) - x(start))} height=${height} fill=${colour(name)} fill-opacity="0.75"><title>${name}: ${seconds(stop - start)}</title></rect>`)}
      <text class="quiet" x=${width} y=${workers.length * 22 + 14} text-anchor="end">${seconds(end)}</text></svg></div>`;
  }

  // ── the page ──────────────────────────────────────────────────────────────────────────────────

  class App extends Component {
    constructor(props) {
      super(props);
      this.state = { history: props.frozen ? props.frozen.history : [], view: location.hash.slice(2) || "overview", connected: false, error: "" };
    }
    componentDidMount() {
      window.addEventListener("hashchange", () => { this.setState({ view: location.hash.slice(2) || "overview" }); const main = document.getElementById("main"); if (main) main.focus({ preventScroll: true }); window.scrollTo(0, 0); });
      if (this.props.frozen) return;
      const events = new EventSource("events");
      events.onopen = () => this.setState({ connected: true });
      events.onerror = () => this.setState({ connected: false });
      events.onmessage = (event) => {
        const digest = JSON.parse(event.data);
        if (digest.error) { this.setState({ error: digest.error, connected: true }); return; }
        const before = this.state.history.map((each, i, all) => (i === all.length - 1 ? slim(each) : i < all.length - 65 && each.calls.length ? { ...each, calls: [] } : each));
        this.setState({ history: [...before, digest].slice(-HISTORY), connected: true, error: "" });
      };
    }
    render({ frozen }, { history, view, connected, error }) {
      const now = history[history.length - 1];
      if (!now || !now.workers) return html`<p class="lead" role="status">${(now && now.error) || error || "Waiting for the first look at the cluster …"}</p>`;
      const [name, ...rest] = view.split("/");
      const props = { now, history, frozen };
      const body = name === "worker" ? html`<${Worker} key=${rest.join("/")} name=${decodeURIComponent(rest.join("/"))} ...${props}/>`
        : name === "calls" ? html`<${Calls} ...${props}/>` : name === "waits" ? html`<${Waits} ...${props}/>`
        : name === "references" ? html`<${References} ...${props}/>` : name === "contexts" ? html`<${Contexts} ...${props}/>`
        : name === "logs" ? html`<${Logs} ...${props}/>` : name === "profile" ? html`<${Profile} ...${props}/>` : html`<${Overview} ...${props}/>`;
      const counts = { calls: now.call_count, waits: now.findings.length, references: now.reference_count, contexts: now.context_count };
      const time = new Date(now.taken * 1000).toLocaleTimeString();
      const status = frozen ? "as it was at " + new Date(now.taken * 1000).toLocaleString() : error ? "no answer: " + error : connected ? "at " + time : "the page has lost its server; last seen at " + time;
      return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
        <header><div class="top"><h1>aiograd</h1><span class="quiet" role="status" aria-live="off">${now.by} · ${status}</span>${frozen ? "" : html`<a href="report.html" download="aiograd.html">Save as a file</a>`}</div>
        <nav aria-label="views">${VIEWS.map(([key, title]) => html`<a href=${"#/" + key} aria-current=${(name === key || (name === "worker" && key === "overview")) ? "page" : "false"}>${title}${counts[key] ? html`<span class=${"count" + (key === "waits" ? " bad" : "")}>${counts[key]}</span>` : ""}</a>`)}</nav></header>
        <main id="main" tabindex="-1">${!frozen && (!connected || error) ? html`<div class="notice bad" role="alert">${error ? "The cluster does not answer: " + error : "The page has lost its server. What is shown is old."}</div>` : ""}${body}</main>`;
    }
  }

  const frozen = document.getElementById("frozen");
  const root = document.getElementById("app");
  root.textContent = "";
  render(html`<${App} frozen=${frozen ? JSON.parse(frozen.textContent) : null}/>`, root);
})();
