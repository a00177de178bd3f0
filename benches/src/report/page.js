"use strict";
// The part behind # names the backends to show, separated by commas; without one, all are shown.
const boxes = [...document.querySelectorAll("#filter input")];
const owned = [...document.querySelectorAll("[data-backend]")];

function show(backends) {
    for (const box of boxes) box.checked = backends.has(box.value);
    for (const element of owned) {
        const off = !backends.has(element.dataset.backend);
        // A bar keeps its place, so that the others do not move.
        if (element instanceof SVGElement) element.classList.toggle("off", off);
        else element.hidden = off;
    }
}

function everything() {
    return new Set(boxes.map((box) => box.value));
}

function fromAddress() {
    const known = everything();
    const named = decodeURIComponent(location.hash.slice(1)).split(",").filter((name) => known.has(name));
    show(named.length ? new Set(named) : known);
}

document.getElementById("filter").addEventListener("change", () => {
    const ticked = boxes.filter((box) => box.checked).map((box) => box.value);
    history.replaceState(null, "", ticked.length === boxes.length ? "#" : "#" + ticked.join(","));
    show(new Set(ticked));
});
document.getElementById("all").addEventListener("click", () => {
    history.replaceState(null, "", "#");
    show(everything());
});
addEventListener("hashchange", fromAddress);
fromAddress();
