// Draws what Python says a layer sees. Runs inside of gr.HTML, which gives it element, props, trigger and watch.
// props.picture and props.depth are the scene, props.value is one window in it: JSON, as Gradio is slow with objects.
const find = name => element.querySelector(name);
const [whole, close, canvas, plot] = [".whole svg", ".close svg", "canvas", ".field svg"].map(find);
const turned = { yaw: 0.5, pitch: 0.3, zoom: 1 };
const read = { picture: "", depth: "", value: "" };  // what was parsed last
let picture = null, value = null, points = null, colours = null, cloud = { key: "" };

const node = (name, attributes, parent) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  parent?.append(made);
  return made;
};
const percent = share => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const signed = number => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(2)}`;

// A pie has a slice for each kernel, from the top clockwise; what none of them takes stays empty.
const slices = (shares, from = -Math.PI / 2) => shares.map(share => [from, from += 2 * Math.PI * Math.min(share, 0.9999)]);
const pie = (parent, x, y, radius, shares, kernels, title) => {
  const group = node("g", {}, parent);
  node("circle", { cx: x, cy: y, r: radius, fill: "rgba(255,255,255,.35)", stroke: "#fff", "stroke-width": radius / 7 }, group);
  slices(shares).forEach(([from, to], k) => {
    if (to - from < 0.01) return;
    const [a, b] = [from, to].map(angle => `${x + radius * Math.cos(angle)},${y + radius * Math.sin(angle)}`);
    node("path", { d: `M${x},${y}L${a}A${radius},${radius} 0 ${to - from > Math.PI ? 1 : 0} 1 ${b}Z`, fill: kernels[k].colour }, group);
  });
  node("title", {}, group).textContent = title;
};

const told = (tap, kernels) => {
  if (tap.depth === null) return "unknown depth" + ", " + shares(tap, kernels);
  return `${tap.depth.toFixed(2)} m${tap.d === null ? "" : `, d = ${signed(tap.d)}`}: ${shares(tap, kernels)}`;
};
const shares = (tap, kernels) => kernels.map((kernel, k) => `${kernel.label} ${percent(tap.g[k])}`).join(", ");

function drawImage(svg, box, radius, outline) {
  svg.setAttribute("viewBox", box.join(" "));
  svg.querySelector("g")?.remove();
  const marks = node("g", {}, svg);
  for (const tap of value.taps) pie(marks, tap.x, tap.y, radius, tap.g, value.kernels, told(tap, value.kernels));
  const [x, y] = value.pixel, star = [...Array(10).keys()].map(i => {
    const length = radius * (i % 2 ? 0.28 : 0.65), angle = i * Math.PI / 5 - Math.PI / 2;
    return `${x + length * Math.cos(angle)},${y + length * Math.sin(angle)}`;
  });
  node("polygon", { points: star.join(" "), fill: "#222", stroke: "#fff", "stroke-width": radius / 8, "pointer-events": "none" }, marks);
  if (outline) node("rect", { ...outline, fill: "none", stroke: "#fff", "stroke-width": picture.width / 250, "pointer-events": "none" }, marks);
}

function drawField() {
  const { field, kernels, taps, unit, metric } = value, width = 400, height = 300, bottom = height - 34;
  plot.replaceChildren();
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const reach = field.d[field.d.length - 1], x = d => width / 2 + d / reach * (width / 2 - 12), y = g => bottom - g * (bottom - 14);
  const text = (at, down, anchor, words) => node("text", { x: at, y: down, "text-anchor": anchor }, plot).textContent = words;
  node("path", { d: `M12,${bottom}H${width - 12}M${width / 2},${bottom}V14`, stroke: "var(--border-color-primary)", fill: "none" }, plot);
  field.g.forEach((g, k) => {
    const line = g.map((share, i) => `${x(field.d[i]).toFixed(1)},${y(share).toFixed(1)}`).join("L");
    node("path", { d: `M12,${bottom}L${line}L${width - 12},${bottom}Z`, fill: kernels[k].colour, "fill-opacity": 0.2 }, plot);
    node("path", { d: `M${line}`, fill: "none", stroke: kernels[k].colour, "stroke-width": 2 }, plot);
  });
  for (const tap of taps) if (tap.d !== null && Math.abs(tap.d) <= reach)
    node("circle", { cx: x(tap.d), cy: bottom, r: 3.5, fill: "var(--body-text-color)", "fill-opacity": 0.45 }, plot);
  text(12, height - 6, "start", "← behind");
  text(width - 12, height - 6, "end", "in front →");
  const cells = metric ? "metres" : `d in grid cells${unit === null ? "" : ` of ${unit < 0.1 ? (100 * unit).toFixed(1) + " cm" : unit.toFixed(2) + " m"}`}`;
  text(width / 2, height - 6, "middle", cells);
  [-1, 1].forEach(side => text(x(side * Math.round(5 * reach) / 10), bottom + 13, "middle", signed(side * Math.round(5 * reach) / 10)));
  text(width / 2 + 5, 22, "start", "100 %");
}

function drawWords() {
  if (!value) return;
  const { kernels, taps, said, metric } = value, legend = find(".legend"), table = find("table");
  legend.replaceChildren(...kernels.map(kernel => {
    const entry = document.createElement("li"), dot = document.createElement("i");
    dot.style.background = kernel.colour;
    entry.append(dot, `${kernel.label}: takes ${percent(kernel.share)} of the window` + (kernel.scale === null ? "" : `, weighs ${percent(kernel.scale)}`));
    return entry;
  }));
  find(".said").textContent = said;
  if (!find("details").open) return;
  const row = (cells, kind) => {
    const made = document.createElement("tr");
    made.append(...cells.map(cell => Object.assign(document.createElement(kind), { textContent: cell })));
    return made;
  };
  table.replaceChildren(
    row(["x", "y", "depth", metric ? "difference" : "d", ...kernels.map(kernel => kernel.label)], "th"),
    ...taps.map(tap => row([tap.x, tap.y, tap.depth === null ? "unknown" : `${tap.depth.toFixed(3)} m`, tap.d === null ? "" : signed(tap.d), ...tap.g.map(percent)], "td")));
}

function unpack({ counts, rows, columns, step, metres }) {
  const bytes = atob(counts), depth = new Float32Array(rows * columns);
  for (let i = 0; i < depth.length; i++) depth[i] = (bytes.charCodeAt(2 * i) + 256 * bytes.charCodeAt(2 * i + 1)) * metres;
  return { step, columns, rows, depth };
}

async function show(image) {
  for (const svg of [whole, close]) {
    svg.replaceChildren();
    // Pixel centers lie on whole numbers, so the image begins half a pixel before.
    node("image", { href: image, x: -0.5, y: -0.5, width: picture.width, height: picture.height, preserveAspectRatio: "none" }, svg);
  }
  const loaded = Object.assign(new Image(), { src: image });
  await loaded.decode();
  const [width, height] = [loaded.naturalWidth, loaded.naturalHeight];
  const paper = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  paper.drawImage(loaded, 0, 0);
  colours = { width, height, data: new Uint32Array(paper.getImageData(0, 0, width, height).data.buffer) };
}

// Gives a function from a point (u, v, depth) to where it is on the canvas, how far away, and how large a metre is there.
// Points are where Camera.back_project puts them: x to the right, y down, z away from the camera.
function projector(width, height) {
  const { fx, fy, cx, cy } = value.camera, [u0, v0, z0] = value.pivot.length ? value.pivot : [cx, cy, 1];
  const [x0, y0] = [(u0 - cx) / fx * z0, (v0 - cy) / fy * z0];
  const [cosYaw, sinYaw, cosPitch, sinPitch] = [Math.cos(turned.yaw), Math.sin(turned.yaw), Math.cos(turned.pitch), Math.sin(turned.pitch)];
  const scale = 0.42 * Math.min(width, height) * turned.zoom / value.radius, far = 4 * value.radius / turned.zoom;
  return (u, v, depth, at) => {
    const x = (u - cx) / fx * depth - x0, y = (v - cy) / fy * depth - y0, z = depth - z0;
    const along = cosYaw * z - sinYaw * x, away = cosPitch * along - sinPitch * y;
    const metre = scale * far / Math.max(far + away, far / 50);  // things farther away are smaller
    at[0] = width / 2 + (cosYaw * x + sinYaw * z) * metre;
    at[1] = height / 2 + (cosPitch * y + sinPitch * along) * metre;
    at[2] = away;
    at[3] = metre;
    return at;
  };
}

function drawPoints(width, height, dense, context) {
  const key = JSON.stringify([width, height, turned, value.camera, value.pivot, value.radius]);
  if (cloud.key === key && cloud.points === points && cloud.colours === colours) return cloud.image;
  const image = context.createImageData(width, height), drawn = new Uint32Array(image.data.buffer);
  const nearest = new Float32Array(width * height).fill(Infinity), project = projector(width, height), at = [0, 0, 0, 0];
  for (let row = 0, i = 0; row < points.rows; row++) for (let column = 0; column < points.columns; column++, i++) {
    const z = points.depth[i], u = column * points.step, v = row * points.step;
    if (!z) continue;
    project(u, v, z, at);
    const half = Math.min(12 * dense, Math.max(dense, 1.2 * at[3] * points.step * z / value.camera.fx)) / 2;  // as large as what it stands for
    const colour = colours.data[Math.floor((v + 0.5) * colours.height / picture.height) * colours.width + Math.floor((u + 0.5) * colours.width / picture.width)];
    const [right, bottom] = [Math.min(width, at[0] + half), Math.min(height, at[1] + half)];
    for (let y = Math.max(0, Math.round(at[1] - half)); y < bottom; y++)
      for (let x = Math.max(0, Math.round(at[0] - half)), place = y * width + x; x < right; x++, place++)
        if (at[2] < nearest[place]) { nearest[place] = at[2]; drawn[place] = colour; }
  }
  cloud = { key, points, colours, image };
  return image;
}

function drawCloud() {
  if (!points || !colours || !value || !canvas.clientWidth) return;
  const dense = window.devicePixelRatio || 1, { unit, field: { d, g }, kernels } = value;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map(length => Math.round(length * dense));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.putImageData(drawPoints(width, height, dense, context), 0, 0);
  if (!value.pivot.length) return;
  const project = projector(width, height), [u, v, z] = value.pivot;
  context.lineWidth = 5 * dense;
  for (let i = 0; unit !== null && i + 1 < d.length; i++) {  // the depth axis through the pixel, in the colours of the kernels that look there
    const [nearer, farther] = [d[i + 1], d[i]].map(at => z - at * unit), most = g.reduce((best, share, k) => share[i] > g[best][i] ? k : best, 0);
    if (nearer <= 0 || g[most][i] < 0.02) continue;
    context.globalAlpha = 0.75 * g[most][i];
    context.strokeStyle = kernels[most].colour;
    context.beginPath();
    for (const depth of [nearer, farther]) context.lineTo(...project(u, v, depth, []).slice(0, 2));
    context.stroke();
  }
  context.globalAlpha = 1;
  const radius = 6 * dense, circle = (x, y) => { context.beginPath(); context.arc(x, y, radius, 0, 2 * Math.PI); };
  const known = value.taps.filter(tap => tap.depth !== null).map(tap => ({ taken: tap.g, at: project(tap.x, tap.y, tap.depth, []) }));
  for (const { taken, at: [x, y] } of known.sort((one, other) => other.at[2] - one.at[2])) {
    circle(x, y); context.fillStyle = "rgba(255,255,255,.35)"; context.fill();
    slices(taken).forEach(([from, to], k) => {
      context.beginPath(); context.moveTo(x, y); context.arc(x, y, radius, from, to);
      context.fillStyle = kernels[k].colour; context.fill();
    });
    circle(x, y); context.lineWidth = dense; context.strokeStyle = "#fff"; context.stroke();
  }
}

let waiting = false;
const turn = () => {  // once a frame, however fast the pointer moves
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawCloud(); });
};

async function draw() {
  if (!props.picture || !props.depth || !props.value) return;
  const fresh = name => read[name] !== props[name] && JSON.parse(read[name] = props[name]);
  const [scene, depth] = [fresh("picture"), fresh("depth")];
  value = fresh("value") || value;
  if (depth) points = unpack(depth);
  if (scene) await show((picture = scene).image);
  const [x, y] = value.pixel, side = 2 * value.half + value.step, corner = side / 2;
  const box = { x: x - corner, y: y - corner, width: side, height: side };
  drawImage(whole, [-0.5, -0.5, picture.width, picture.height], Math.max(0.42 * value.step, picture.width / 130), box);
  drawImage(close, [x - 0.8 * side, y - 0.6 * side, 1.6 * side, 1.2 * side], 0.42 * value.step);
  drawField();
  drawWords();
  drawCloud();
  element.dataset.drawn = value.number;  // tests wait for it
}

for (const svg of [whole, close]) svg.addEventListener("click", event => {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  trigger("select", { index: [Math.round(at.x), Math.round(at.y)] });
});
whole.addEventListener("keydown", event => {
  const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!move) return;
  event.preventDefault();
  trigger("select", { index: value.pixel.map((at, axis) => at + move[axis] * value.grid) });
});
canvas.addEventListener("pointerdown", event => canvas.setPointerCapture(event.pointerId));
canvas.addEventListener("pointermove", event => {
  if (!event.buttons) return;
  turned.yaw += event.movementX / 150;
  turned.pitch = Math.min(1.5, Math.max(-1.5, turned.pitch + event.movementY / 150));
  turn();
});
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  turned.zoom = Math.min(50, Math.max(0.02, turned.zoom * Math.exp(-event.deltaY / 500)));
  turn();
}, { passive: false });
find("details").addEventListener("toggle", drawWords);
new ResizeObserver(turn).observe(canvas);
watch(["value", "picture", "depth"], draw);
draw();
