//! [`with_setters!`](crate::with_setters): options that grow without breaking who uses them.

/// Defines a struct of options with public fields, marked `#[non_exhaustive]`, and a setter
/// for each field that takes and gives the options by value:
/// `CreateOptions::default().size_bytes(1 << 30)`.
#[macro_export]
macro_rules! with_setters {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident {
            $( $(#[doc = $doc:literal])* pub $field:ident: $type:ty, )*
        }
    ) => {
        $(#[$attribute])*
        #[non_exhaustive]
        $visibility struct $name {
            $( $(#[doc = $doc])* pub $field: $type, )*
        }

        impl $name {
            $(
                $(#[doc = $doc])*
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}
