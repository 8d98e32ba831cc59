// The live view of a cluster in a notebook: an anywidget module. Everything is set as text.
function cell(row, text, align) {
  const made = row.insertCell();
  made.textContent = text;
  made.style.textAlign = align || "left";
  made.style.padding = "2px 10px 2px 0";
  return made;
}
function draw(root, data) {
  root.textContent = "";
  if (!data || !data.workers) {
    root.textContent = data && data.error ? "The cluster does not answer: " + data.error : "Looking at the cluster …";
    return;
  }
  const head = document.createElement("div");
  head.textContent = data.workers.length + " workers · " + data.calls + " calls under way · " + data.values + " shared values";
  head.style.fontWeight = "600";
  root.append(head);
  const table = document.createElement("table");
  const first = table.createTHead().insertRow();
  for (const [title, align] of [["worker"], ["state"], ["memory", "right"], ["lag", "right"], ["calling", "right"], ["called", "right"], ["values", "right"]]) cell(first, title, align).style.fontWeight = "600";
  const body = table.createTBody();
  for (const each of data.workers) {
    const row = body.insertRow();
    cell(row, each.name);
    const state = cell(row, each.state);
    state.style.color = each.state === "running" ? "#3f9a63" : "#cc5a55";
    cell(row, each.memory === null ? "–" : (each.memory / 1e6).toFixed(0) + " MB", "right");
    cell(row, each.lag === null ? "–" : (each.lag * 1e3).toFixed(1) + " ms", "right");
    for (const count of [each.calling, each.called, each.counters.owner_rrefs]) cell(row, count === undefined || count === null ? "–" : String(count), "right");
    if (each.why) cell(row, each.why).style.paddingLeft = "10px";
  }
  root.append(table);
  for (const finding of data.findings) {
    const pre = document.createElement("pre");
    pre.style.margin = "8px 0 0";
    pre.textContent = [finding.title, ...finding.hops.map((hop) => "  " + hop.worker + "  " + (hop.function || "–") + "  " + hop.line.split("/").slice(-2).join("/") + "  " + hop.note)].join("\n");
    root.append(pre);
  }
}
function render({ model, el }) {
  const root = document.createElement("div");
  root.setAttribute("role", "status");
  root.style.cssText = "border-left: 3px solid #4a7fd0; padding: 2px 0 2px 10px; overflow-x: auto";
  el.append(root);
  const update = () => draw(root, model.get("digest"));
  model.on("change:digest", update);
  update();
}
export default { render };
