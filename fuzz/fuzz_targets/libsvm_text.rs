//! Whatever text comes, samples or a model: no panic. Samples have as many labels as rows, and a
//! model is written as text that is read as the same text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_training::svm::libsvm::{read, read_model, write_model};

fuzz_target!(|text: &[u8]| {
    if let Ok(all) = read(text, |_| true) {
        assert_eq!((all.samples.len(), all.labels.len()), (all.rows, all.rows));
        let features = all.samples.features();
        let indices = (0..all.rows).flat_map(|row| all.samples.nonzero(row));
        assert!(indices.into_iter().all(|(index, value)| index < features && value.is_finite()));
    }
    if let Ok(model) = read_model(text) {
        let (mut written, mut again) = (Vec::new(), Vec::new());
        write_model(&model, &mut written).expect("fits memory");
        // Features of value 0 are not written.
        write_model(&read_model(&written[..]).expect("was written"), &mut again).expect("fits memory");
        assert_eq!(written, again);
    }
});
