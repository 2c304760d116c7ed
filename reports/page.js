// Says under a picture what the mouse is on, and shows one budget at a time. The page is whole without it.
for (const section of document.querySelectorAll(".explorer")) {
  const told = section.querySelector(".told");
  let chosen = null;
  const tell = (event) => {
    const box = event.target.closest("rect");
    if (!box) return;
    if (chosen) chosen.classList.remove("chosen");
    chosen = box;
    box.classList.add("chosen");
    told.textContent = box.querySelector("title").textContent;
  };
  section.addEventListener("mouseover", tell);
  section.addEventListener("click", tell);
  const slider = section.querySelector(".slider");
  if (!slider) continue;
  const figures = [...section.querySelectorAll("figure")];
  const input = slider.querySelector("input");
  const show = () => {
    figures.forEach((figure, i) => { figure.hidden = i !== Number(input.value); });
    slider.querySelector("output").textContent = figures[Number(input.value)].dataset.budget;
  };
  slider.hidden = false;
  input.addEventListener("input", show);
  show();
}
