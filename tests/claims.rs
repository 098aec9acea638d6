//! Claims of papers: the experiments of `cargo bench --bench training`. Exact ones run whole, those
//! that train in a short form. The page has a row for each.

#[path = "../benches/training/claims/mod.rs"]
mod claims;

use claims::images::Data;
use claims::{
    Claim, EXPERIMENTS, Material, Verdict, barriers, blink, das, hybrid, jin, quality, staleness, zhang,
};

/// So many seeds, and the digits alone.
fn material(seeds: u64) -> Material {
    let digits = Data::digits().expect("the built-in digits are whole");
    Material::new(digits, Err("the test has none".to_owned()), (42..42 + seeds).collect())
}

fn found(experiment: fn(&Material) -> Result<Claim, String>) -> Claim {
    experiment(&material(1).short()).expect("the experiment can be made")
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
fn claims_of_trainings_are_found_in_short() {
    for experiment in [
        zhang::beside_downpour,
        quality::grid_keeps_quality,
        jin::lost_rank,
        barriers::waiting,
        barriers::credits,
        staleness::throughput,
        staleness::regret,
        staleness::sweep,
        quality::outer_steps_keep_quality,
    ] {
        let claim = found(experiment);
        assert_eq!(claim.verdict, Verdict::Found, "{}", claim.text());
    }
    // One seed says too little.
    let several = material(5).short();
    for experiment in [barriers::final_loss, quality::majority_keeps_accuracy] {
        let claim = experiment(&several).expect("the experiment can be made");
        assert_eq!(claim.verdict, Verdict::Found, "{}", claim.text());
    }
}

#[test]
fn an_experiment_that_does_not_find_its_claim_says_why() {
    let claim = found(jin::crossing);
    let Verdict::NotFound { because } = &claim.verdict else { panic!("{}", claim.text()) };
    assert!(!because.is_empty() && !claim.table.contains("NaN"), "{}", claim.text());
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
    let claim = zhang::beside_downpour(&material(1)).expect("it needs no experiment");
    let Verdict::NotMeasured { because } = &claim.verdict else { panic!("{}", claim.text()) };
    assert_eq!(because, "the test has none");
}

#[test]
fn the_page_has_a_row_for_each_experiment() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/training.md"));
    let page = page.expect("the page is there");
    for (name, _) in EXPERIMENTS {
        assert!(page.contains(&format!("| {name} | ")), "run cargo bench --bench training: no row {name}");
    }
}
