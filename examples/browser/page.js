// Shows which exit an image takes, how sure the network is there, and what time that saves.

import { load, SIDE } from "./network.js";

const SHOWN = 32;
const $ = (id) => document.getElementById(id);
const pause = () => new Promise((resolve) => setTimeout(resolve)); // lets the browser paint
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const tally = { n: 0, early: 0, full: 0, flops: 0, exits: [] };

let network;
let offset = 0;

try {
  network = await load();
  const { promise, flops } = network.facts;
  const [summary, ...conditions] = promise.split("\n");
  $("promise").textContent = summary;
  $("conditions").textContent = conditions.join("\n");
  $("count").textContent = network.images.length;
  tally.exits = flops.map(() => 0);
  $("exits").append(...flops.map((_, k) => element("li", `exit ${k + 1}`)));
  showImages();
  showTally();
  await show(network.images[0]);
  document.body.dataset.ready = "yes";
} catch (error) {
  fault(error);
}

/** Classify and time an image, and show what became of it. */
async function show(grey) {
  await pause();
  const found = await network.classify(grey);
  const { exit, confidence, prediction, shares } = found;
  draw($("seen"), grey);
  [...$("exits").children].forEach((item, k) => {
    item.dataset.state = k < exit ? "passed" : k === exit ? "left" : "";
  });
  const { classes, flops } = network.facts;
  const sure = confidence === null ? "the last exit, which answers all" : percent(confidence);
  $("answer").textContent = `${classes[prediction]}, by exit ${exit + 1}. Confidence: ${sure}.`;
  const best = shares.map((share, k) => [share, classes[k]]).sort((a, b) => b[0] - a[0]);
  $("classes").replaceChildren(...best.slice(0, 3).map(([s, name]) => row(name, percent(s))));

  const { early, full } = await network.time(grey);
  $("early").textContent = `${early.toFixed(2)} ms`;
  $("full").textContent = `${full.toFixed(2)} ms`;
  $("saved").textContent = percent(1 - early / full);
  tally.n += 1;
  tally.early += early;
  tally.full += full;
  tally.flops += flops[exit];
  tally.exits[exit] += 1;
  showTally();
  return found;
}

function showTally() {
  const { n, exits } = tally;
  const known = (share) => (n ? percent(share) : "–");
  $("tally").replaceChildren(
    row("images", n),
    ...exits.map((count, k) => row(`left at exit ${k + 1}`, known(count / n))),
    row("time saved", known(1 - tally.early / tally.full)),
    row("FLOPs saved", known(1 - tally.flops / n / network.facts.full_flops)),
  );
}

function showImages() {
  const images = Array.from({ length: SHOWN }, (_, k) => (offset + k) % network.images.length);
  $("images").replaceChildren(
    ...images.map((number) => {
      const button = element("button");
      const canvas = element("canvas");
      canvas.width = canvas.height = SIDE;
      draw(canvas, network.images[number]);
      button.type = "button";
      button.ariaLabel = `image ${number + 1}`;
      button.append(canvas);
      button.onclick = () => {
        for (const other of $("images").children) other.ariaPressed = other === button;
        return show(network.images[number]).catch(fault);
      };
      return button;
    }),
  );
}

$("more").onclick = () => {
  offset = (offset + SHOWN) % network.images.length;
  showImages();
};

$("all").onclick = async () => {
  $("all").disabled = true;
  try {
    for (const grey of network.images) await show(grey);
  } catch (error) {
    fault(error);
  } finally {
    $("all").disabled = false;
  }
};

// ---------------------------------------------------------------------------------- drawing

const drawing = $("drawing").getContext("2d", { willReadFrequently: true });
clear();

function clear() {
  drawing.fillStyle = "#000";
  drawing.fillRect(0, 0, drawing.canvas.width, drawing.canvas.height);
}

function stroke(event) {
  if (!event.buttons) return;
  drawing.strokeStyle = "#fff";
  drawing.lineWidth = 22;
  drawing.lineCap = "round";
  drawing.beginPath();
  drawing.moveTo(event.offsetX - event.movementX, event.offsetY - event.movementY);
  drawing.lineTo(event.offsetX, event.offsetY);
  drawing.stroke();
}

const shown = () => show(greyOf(drawing.canvas)).catch(fault);

$("drawing").onpointerdown = (event) => {
  event.target.setPointerCapture(event.pointerId);
  stroke(event);
};
$("drawing").onpointermove = stroke;
$("drawing").onpointerup = shown;
$("clear").onclick = clear;
$("file").onchange = async (event) => {
  try {
    const image = await createImageBitmap(event.target.files[0]);
    const { width, height } = drawing.canvas;
    const scale = Math.min(width / image.width, height / image.height);
    clear();
    drawing.drawImage(
      image,
      (width - scale * image.width) / 2,
      (height - scale * image.height) / 2,
      scale * image.width,
      scale * image.height,
    );
    await shown();
  } catch (error) {
    fault(error);
  }
};

/** Return a canvas as 28 x 28 grey values; a bright ground is inverted, as the network needs. */
function greyOf(canvas) {
  const small = new OffscreenCanvas(SIDE, SIDE).getContext("2d");
  small.imageSmoothingQuality = "high";
  small.drawImage(canvas, 0, 0, SIDE, SIDE);
  const { data } = small.getImageData(0, 0, SIDE, SIDE);
  const grey = Uint8Array.from({ length: SIDE * SIDE }, (_, k) =>
    Math.round(0.299 * data[4 * k] + 0.587 * data[4 * k + 1] + 0.114 * data[4 * k + 2]),
  );
  const corners = [0, SIDE - 1, SIDE * (SIDE - 1), SIDE * SIDE - 1];
  const bright = corners.every((k) => grey[k] > 127);
  return bright ? grey.map((value) => 255 - value) : grey;
}

function draw(canvas, grey) {
  const pixels = new ImageData(SIDE, SIDE);
  grey.forEach((value, k) => pixels.data.set([value, value, value, 255], 4 * k));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function element(kind, text = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function row(name, value) {
  const made = element("tr");
  const head = element("th", name);
  head.scope = "row";
  made.append(head, element("td", value));
  return made;
}

function fault(error) {
  $("fault").hidden = false;
  $("fault").textContent = `The page does not work: ${error.message ?? error}`;
}
