//! Threads that compute the gradients of simulated ranks.
//!
//! A gradient is a function of its rank, its step and its parameters, which stay as they are until
//! it is ready. So any thread may compute it at any time before. The vectors of a rank go to a
//! thread and come back.
//!
//! Threads live as long as the simulation works: a new one for each batch would take as long as a
//! gradient. So batches can be small, and vectors are in the caches still when ranks step by them.

use std::sync::mpsc::{Receiver, Sender, channel};

use pleach_collectives::Rank;

use super::rank::SimulatedRank;
use crate::learner::Learner;

/// Most gradients that a thread computes at a time: their vectors fit into its cache.
const GRADIENTS_PER_THREAD: usize = 16;

/// A gradient that a thread computes.
pub(crate) struct Task {
    rank: Rank,
    step: u64,
    /// The parameters, and where the gradient goes.
    vectors: [Vec<f32>; 2],
    /// Once it is computed.
    loss: f32,
}

impl Task {
    pub(crate) fn new(rank: Rank, step: u64, vectors: [Vec<f32>; 2]) -> Self {
        Self { rank, step, vectors, loss: 0.0 }
    }

    /// The loss, and the vectors.
    pub(crate) fn ended(self) -> (f32, [Vec<f32>; 2]) {
        (self.loss, self.vectors)
    }

    fn compute(&mut self, learner: &impl Learner) {
        let [parameters, gradient] = &mut self.vectors;
        self.loss = learner.gradient(self.rank, self.step, parameters, gradient);
    }
}

/// Another thread.
struct Other {
    tasks: Sender<Vec<Task>>,
    computed: Receiver<Vec<Task>>,
}

/// This thread and others; see the module.
pub(crate) struct Threads {
    others: Vec<Other>,
}

impl Threads {
    /// Does something with so many threads, of which this one is the first.
    pub(crate) fn with<T>(learner: &impl Learner, threads: usize, body: impl FnOnce(&Self) -> T) -> T {
        std::thread::scope(|scope| {
            let other = |_| {
                let (tasks, asked) = channel::<Vec<Task>>();
                let (ended, computed) = channel();
                scope.spawn(move || {
                    for mut tasks in asked {
                        tasks.iter_mut().for_each(|task| task.compute(learner));
                        if ended.send(tasks).is_err() {
                            return;
                        }
                    }
                });
                Other { tasks, computed }
            };
            // They end when nobody can ask them any more.
            body(&Self { others: (1..threads).map(other).collect() })
        })
    }

    /// Computes gradients that are begun, those that are ready first.
    ///
    /// # Panics
    ///
    /// The learner panics.
    pub(crate) fn compute(&self, ranks: &mut [SimulatedRank], learner: &impl Learner) {
        let mut lacking: Vec<&mut SimulatedRank> =
            ranks.iter_mut().filter(|rank| rank.lacks_gradient()).collect();
        let threads = 1 + self.others.len();
        let most = threads * GRADIENTS_PER_THREAD;
        if lacking.len() > most {
            lacking.select_nth_unstable_by_key(most, |rank| rank.ready_from());
            lacking.truncate(most);
        }
        let each = lacking.len().div_ceil(threads).max(1);
        let own = each.min(lacking.len());
        let (own, lent) = lacking.split_at_mut(own);
        for (other, ranks) in self.others.iter().zip(lent.chunks_mut(each)) {
            let tasks = ranks.iter_mut().map(|rank| rank.lend()).collect();
            other.tasks.send(tasks).expect("the learner does not panic");
        }
        for rank in own {
            let mut task = rank.lend();
            task.compute(learner);
            rank.take_back(task);
        }
        for (other, ranks) in self.others.iter().zip(lent.chunks_mut(each)) {
            let tasks = other.computed.recv().expect("the learner does not panic");
            ranks.iter_mut().zip(tasks).for_each(|(rank, task)| rank.take_back(task));
        }
    }
}
