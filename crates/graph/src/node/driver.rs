//! [`DriverFacts`]: all that there is to know of a driver without opening anything.

/// What a driver is called, what its nodes may be told, and how they behave in a graph. How one is opened stands beside
/// it in the table of drivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverFacts {
    /// The name, as options have it.
    pub name: &'static str,
    /// Lists of the options that a node may be told, beside its children and what every node has.
    pub options: &'static [&'static [&'static str]],
    /// Options that may change while a node is used. One that ends with a dot stands for all that begin with it.
    pub changeable: &'static [&'static str],
    /// A node shows what it stands on, with something done on the way.
    pub is_filter: bool,
    /// A node is as long as what it stands on, and notes that when it is opened.
    pub follows_size: bool,
    /// Images may stand on others.
    pub has_backing: bool,
    /// A node can be opened anew with other options.
    pub is_reopened: bool,
    /// A node can be opened anew on another file.
    pub changes_file: bool,
    /// A node is not the same once its options are opened a second time.
    pub has_past: bool,
    /// What its nodes are called for people; `None` for those that stand on no other, and for those that have no name.
    pub naming: Option<Naming>,
}

/// What is known of the names of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Naming {
    /// Lists of options that change what is seen through the node; `x.` stands for all below it.
    pub in_name: &'static [&'static [&'static str]],
    /// Children, the one that a name could stand for first.
    pub children: &'static [&'static str],
    /// How names are made.
    pub kind: NamingKind,
}

/// How the names of nodes are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamingKind {
    /// Its child's name opens it, by probing or with `-f`.
    Format,
    /// No name opens it.
    Filter,
    /// Has names of its own: `DRIVER:...`.
    Protocol,
}

impl DriverFacts {
    /// A driver with no options of its own, that is no filter, and whose nodes can be opened anew.
    pub const fn named(name: &'static str) -> DriverFacts {
        DriverFacts {
            name,
            options: &[],
            changeable: &[],
            is_filter: false,
            follows_size: false,
            has_backing: false,
            is_reopened: true,
            changes_file: false,
            has_past: false,
            naming: None,
        }
    }

    /// As [`DriverFacts::named`], for one whose nodes show what they stand on.
    pub const fn filter(name: &'static str) -> DriverFacts {
        DriverFacts {
            is_filter: true,
            ..DriverFacts::named(name)
        }
    }

    /// The same of a driver that differs in its name alone.
    #[must_use]
    pub const fn called(self, name: &'static str) -> DriverFacts {
        DriverFacts { name, ..self }
    }

    /// The same with what is known of names.
    #[must_use]
    pub const fn with_naming(
        self,
        kind: NamingKind,
        in_name: &'static [&'static [&'static str]],
        children: &'static [&'static str],
    ) -> DriverFacts {
        DriverFacts {
            naming: Some(Naming {
                in_name,
                children,
                kind,
            }),
            ..self
        }
    }

    /// Whether an option of a node's own may be another one than before.
    pub(crate) fn may_change(&self, key: &str) -> bool {
        let mut changeable = self.changeable.iter();
        changeable.any(|known| match known.ends_with('.') {
            true => key.starts_with(known),
            false => key == *known,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_stands_for_all_that_begin_so() {
        let facts = DriverFacts {
            changeable: &["a", "b."],
            ..DriverFacts::named("x")
        };
        for (key, may) in [("a", true), ("a.b", false), ("b", false), ("b.c", true)] {
            assert_eq!(facts.may_change(key), may, "{key}");
        }
    }
}
