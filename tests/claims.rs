//! Claims of papers, in the form that takes a moment: those experiments of `cargo bench --bench
//! training` that plan, or train for few steps, and the page on which all of them stand.

#[path = "../benches/training/claims/mod.rs"]
mod claims;

use claims::images::Data;
use claims::{Claim, EXPERIMENTS, Material, Verdict, barriers, blink, das, hybrid, quality, zhang};

/// One seed, and the digits alone.
fn material() -> Material {
    let digits = Data::digits().expect("the built-in digits are whole");
    Material { digits, mnist: Err("the short form needs none".to_owned()), seeds: vec![42] }
}

fn found(experiment: fn(&Material) -> Result<Claim, String>) -> Claim {
    experiment(&material()).expect("the experiment can be made")
}

#[test]
fn exact_claims_are_found() {
    for experiment in [
        das::speedups,
        das::first_layers_first,
        hybrid::fewest_bytes,
        zhang::stability,
        barriers::zipline_is_optimal,
        quality::outer_steps_save_bytes,
    ] {
        let claim = found(experiment);
        assert_eq!(claim.verdict, Verdict::Found, "{}", claim.text());
    }
}

#[test]
fn packed_trees_are_never_slower_than_rings_on_any_allocation() {
    let rates = blink::rates().expect("every allocation is packed");
    // As many connected allocations as the paper counts.
    assert_eq!(rates.len(), 46);
    assert!(rates.iter().all(blink::Rates::is_no_slower));
    assert!(rates.iter().any(|rates| rates.has_ring) && rates.iter().any(|rates| !rates.has_ring));
    let claim = found(blink::shorter_steps);
    assert!(claim.table.lines().count() == 2 + 12 && !claim.table.contains("NaN"), "{}", claim.table);
}

#[test]
fn an_experiment_without_its_images_says_so() {
    let claim = found(zhang::beside_downpour);
    let Verdict::NotMeasured { because } = &claim.verdict else { panic!("{}", claim.text()) };
    assert_eq!(because, "the short form needs none");
}

#[test]
fn the_page_has_a_row_for_each_experiment() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/training.md"));
    let page = page.expect("the page is there");
    for (name, _) in EXPERIMENTS {
        assert!(page.contains(&format!("| {name} | ")), "run cargo bench --bench training: no row {name}");
    }
}
